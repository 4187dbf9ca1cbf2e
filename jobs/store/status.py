"""A job in numbers, read from the database alone: sums in SQL, and small JSON stats merged.

The view job_progress (migrations/versions/0002_queue.py) gives the same numbers to people who write SQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, case, func, select

from gristmill.jobs.owner import Owner, is_alive, is_dead, is_local
from gristmill.jobs.records import JobRecord, JobStatus
from gristmill.jobs.states import TERMINAL_JOB_STATES, JobState, Runner, ShardState
from gristmill.jobs.stats import JobStats, merge_stats
from gristmill.jobs.store.job_rows import load_job
from gristmill.jobs.store.models import events, jobs, shards, workers

_LEARN_FROM_JOBS = 20
_MIN_LEARN_S = 5.0
_MIN_LEARN_ROWS = 64
WORKER_LOST_S = 60.0  # a worker that said nothing for so long is not counted on


def load_status(connection: Connection, job_id: str, now: float, lease_s: float) -> JobStatus:
    """The status of one job at `now`."""
    job = load_job(connection, job_id)
    active_s = float(connection.scalar(select(jobs.c.active_s).where(jobs.c.id == job_id)) or 0.0)
    elapsed_s = _elapsed(job, active_s, now, lease_s)
    sums = connection.execute(_select_sums(job_id)).one()
    by_state = select(shards.c.state, func.count()).where(shards.c.job_id == job_id).group_by(shards.c.state)
    running = connection.execute(
        select(shards.c.owner, shards.c.lease_until).where(
            shards.c.job_id == job_id, shards.c.state == ShardState.RUNNING
        )
    ).all()
    stats = _load_stats(connection, job_id)
    committed = int(sums.completed + sums.failed + sums.skipped)
    tokens = int(sums.prompt_tokens + sums.completion_tokens)
    rows_done = min(int(sums.rows_done), job.num_rows)
    return JobStatus(
        job_id=job.job_id,
        state=job.state.value,
        message=job.message,
        model=job.model,
        output=job.output,
        fingerprint=job.fingerprint,
        owner=str(job.owner) if job.owner and not is_dead(job.owner) else None,
        created_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        elapsed_s=elapsed_s,
        eta_s=_eta(job, rows_done, elapsed_s),
        rows=job.num_rows,
        rows_done=rows_done,
        completed=int(sums.completed),
        failed=int(sums.failed),
        skipped=int(sums.skipped),
        not_run=job.num_rows - committed,
        errors_by_code=dict(sorted(stats.errors_by_code.items())),
        finish_reasons=dict(sorted(stats.finish_reasons.items())),
        prompt_tokens=int(sums.prompt_tokens),
        completion_tokens=int(sums.completion_tokens),
        cached_tokens=int(sums.cached_tokens),
        rows_per_s=_rate(rows_done, elapsed_s),
        tokens_per_s=_rate(tokens, elapsed_s),
        completion_tokens_per_s=_rate(int(sums.completion_tokens), elapsed_s),
        saved_tokens_share=_rate(int(sums.cached_tokens), float(sums.prompt_tokens)),
        preemptions=stats.num_preemptions,
        kv_waste=stats.kv_waste,
        step_budget_utilization=stats.step_budget_utilization,
        percentiles=stats.percentiles(),
        shards={state: count for state, count in connection.execute(by_state.order_by(shards.c.state))},
        runner=job.runner.value,
        priority=job.priority,
        idempotency_key=job.idempotency_key,
        not_before=job.not_before,
        deadline_at=job.deadline_at,
        num_workers=len({row.owner for row in running}),
        is_live=_is_live(connection, job, [row.lease_until for row in running], now, lease_s),
        regrouped=_load_regrouped(connection, job_id),
    )


def load_learned_rows_per_s(connection: Connection, fingerprint: str, max_tokens: int | None) -> float | None:
    """Rows a second of one engine over the last jobs of this model and max_tokens; None: too few to tell.

    A local run's time is that of its process; a submitted job's is what its workers' engines were busy.
    """
    committed = select(func.coalesce(func.sum(shards.c.part_rows), 0)).where(shards.c.job_id == jobs.c.id)
    query = (
        select(jobs.c.runner, jobs.c.active_s, jobs.c.stats, committed.scalar_subquery().label("rows"))
        .where(jobs.c.fingerprint == fingerprint, jobs.c.max_tokens.is_not_distinct_from(max_tokens))
        .order_by(jobs.c.created_at.desc())
        .limit(_LEARN_FROM_JOBS)
    )
    measured = connection.execute(query).all()
    seconds = sum(
        row.active_s if row.runner == Runner.LOCAL else JobStats.from_json(row.stats).busy_s
        for row in measured
    )
    rows = sum(int(row.rows) for row in measured)
    return float(rows / seconds) if seconds >= _MIN_LEARN_S and rows >= _MIN_LEARN_ROWS else None


def _load_stats(connection: Connection, job_id: str) -> JobStats:
    """The sum that the job keeps of its done shards, and the others one by one: few have any."""
    done = connection.scalar(select(jobs.c.stats).where(jobs.c.id == job_id))
    others = select(shards.c.stats).where(
        shards.c.job_id == job_id, shards.c.state != ShardState.DONE, shards.c.stats.is_not(None)
    )
    return merge_stats([done, *connection.scalars(others)])


def _load_regrouped(connection: Connection, job_id: str) -> dict[str, Any] | None:
    """What the event of the planning tells of a regrouping."""
    planned = events.c.job_id == job_id, events.c.kind.in_(("created", "planned"))
    detail = connection.scalar(select(events.c.detail).where(*planned).order_by(events.c.id).limit(1))
    return None if detail is None else detail.get("regrouped")


def _select_sums(job_id: str) -> Any:
    columns = shards.c
    running = columns.state == ShardState.RUNNING
    more = columns.rows_reported > columns.part_rows
    rows_done = case((running & more, columns.rows_reported), else_=columns.part_rows)
    sums = {
        "completed": columns.rows_completed,
        "failed": columns.rows_failed,
        "skipped": columns.rows_skipped,
        "prompt_tokens": columns.prompt_tokens,
        "completion_tokens": columns.completion_tokens,
        "cached_tokens": columns.cached_tokens,
        "rows_done": rows_done,
    }
    labelled = [func.coalesce(func.sum(column), 0).label(name) for name, column in sums.items()]
    return select(*labelled).where(columns.job_id == job_id)


def _is_live(
    connection: Connection, job: JobRecord, leases: Sequence[float | None], now: float, lease_s: float
) -> bool:
    """Whether a process works on the job, or one that offers its model could take it up at once."""
    if job.state in TERMINAL_JOB_STATES:
        return False
    if job.runner == Runner.LOCAL:
        if job.owner is None or is_local(job.owner):
            return job.owner is not None and is_alive(job.owner)
        return (job.owner_seen_at or 0.0) + lease_s >= now
    if any(lease is not None and lease >= now for lease in leases):
        return True
    alive = select(workers.c.owner, workers.c.models).where(
        workers.c.stopped_at.is_(None), workers.c.seen_at >= now - WORKER_LOST_S
    )
    return any(
        any(_fits(model, job) for model in models) and not is_dead(Owner.from_text(owner))
        for owner, models in connection.execute(alive)
    )


def _fits(model: dict[str, Any], job: JobRecord) -> bool:
    """Whether a worker's model is the one that the job names, and has the weights with which it began."""
    return bool(model["name"] == job.model and job.fingerprint in ("", model["fingerprint"]))


def _elapsed(job: JobRecord, active_s: float, now: float, lease_s: float) -> float:
    """The time that a process worked on the job; for a local one that none held, from its start to its end."""
    if job.runner == Runner.LOCAL and job.owner is None and active_s == 0.0:
        return max(0.0, (job.finished_at or now) - job.started_at) if job.started_at is not None else 0.0
    if job.owner_seen_at is None or job.finished_at is not None:
        return active_s
    if job.owner is not None and is_dead(job.owner):
        return active_s  # the view, which can't tell, counts up to a minute more
    return active_s + min(max(0.0, now - job.owner_seen_at), lease_s)


def _eta(job: JobRecord, rows_done: int, elapsed_s: float) -> float | None:
    if job.finished_at is not None:
        return 0.0 if job.state == JobState.COMPLETED else None
    rate = _rate(rows_done, elapsed_s)
    return (job.num_rows - rows_done) / rate if rate else None


def _rate(amount: float, over: float) -> float | None:
    return amount / over if over > 0 else None
