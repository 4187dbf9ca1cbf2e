"""A job in numbers, read from the database alone: the view job_progress, and small JSON stats merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, func, select

from gristmill.jobs.owner import Owner, is_alive, is_dead, is_local
from gristmill.jobs.records import JobRecord, JobStatus
from gristmill.jobs.states import TERMINAL_JOB_STATES, Runner, ShardState
from gristmill.jobs.stats import JobStats, merge_stats
from gristmill.jobs.store.job_rows import load_job
from gristmill.jobs.store.models import events, job_progress, jobs, shards, workers

_OF_JOB = (  # what a JobStatus repeats of the JobRecord
    *("message", "model", "output", "fingerprint", "created_at", "started_at", "finished_at"),
    *("priority", "idempotency_key", "not_before", "deadline_at"),
)
_LEARN_FROM_JOBS = 20
_MIN_LEARN_S = 5.0
_MIN_LEARN_ROWS = 64


def load_status(connection: Connection, job_id: str, now: float, lease_s: float) -> JobStatus:
    """The status of one job at `now`."""
    job = load_job(connection, job_id)
    query = select(job_progress).where(job_progress.c.job_id == job_id)
    figures = dict(connection.execute(query).mappings().one())
    counts = {state.value: figures.pop(f"shards_{state}") for state in sorted(ShardState)}
    running = connection.execute(
        select(shards.c.owner, shards.c.lease_until).where(
            shards.c.job_id == job_id, shards.c.state == ShardState.RUNNING
        )
    ).all()
    stats = _load_stats(connection, job_id)
    cached_share = figures.pop("cached_share")
    return JobStatus(
        **figures,
        **{name: getattr(job, name) for name in _OF_JOB},
        state=job.state.value,
        owner=str(job.owner) if job.owner and not is_dead(job.owner) else None,
        errors_by_code=dict(sorted(stats.errors_by_code.items())),
        finish_reasons=dict(sorted(stats.finish_reasons.items())),
        saved_tokens_share=cached_share,
        preemptions=stats.num_preemptions,
        kv_waste=stats.kv_waste,
        step_budget_utilization=stats.step_budget_utilization,
        percentiles=stats.percentiles(),
        shards={state: count for state, count in counts.items() if count},
        runner=job.runner.value,
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
        workers.c.stopped_at.is_(None), workers.c.seen_at >= now - workers.c.lease_s
    )
    return any(
        any(_fits(model, job) for model in models) and not is_dead(Owner.from_text(owner))
        for owner, models in connection.execute(alive)
    )


def _fits(model: dict[str, Any], job: JobRecord) -> bool:
    """Whether a worker's model is the one that the job names, and has the weights with which it began."""
    return bool(model["name"] == job.model and job.fingerprint in ("", model["fingerprint"]))
