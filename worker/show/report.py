"""A job's figures for people (a short table) and for programs (`--json`), from the database only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from gristmill.jobs.records import JobStatus, WorkerRecord
from gristmill.jobs.states import RESUMABLE_JOB_STATES, TERMINAL_JOB_STATES, JobState, Runner
from gristmill.worker.show.progress import Progress
from gristmill.worker.show.tables import (
    build_table,
    to_duration_text,
    to_fields_text,
    to_number_text,
    to_seconds_text,
    to_share_text,
    to_text,
)

PERCENTILE_LABELS = {
    "queue_wait_s": "queue wait",
    "time_to_first_token_s": "first token",
    "time_per_token_s": "per token",
}
TIMES = ("created_at", "started_at", "finished_at", "not_before", "deadline_at")
WORKER_TIMES = ("started_at", "seen_at", "stopped_at")


def to_status_payload(status: JobStatus, is_live: bool | None = None) -> dict[str, Any]:
    """What `status --json` prints. Times are ISO 8601 in UTC; durations are seconds; shares lie in 0..1.

    is_live: in place of the status's own, for a process that reports on the job it holds itself.
    """
    live = status.is_live if is_live is None else is_live
    payload = asdict(status)
    for name in TIMES:
        payload[name] = to_time_text(payload[name])
    payload["is_live"] = live
    payload["resume"] = to_resume_command(status, live)
    payload["retry"] = to_retry_command(status)
    return payload


def to_resume_command(status: JobStatus, is_live: bool) -> str | None:
    """The command that goes on with the job; None where nothing is left to do or a process is, or will be, at it."""
    is_dropped = status.state not in TERMINAL_JOB_STATES and not is_live and status.runner == Runner.LOCAL
    if status.state in RESUMABLE_JOB_STATES or is_dropped:
        return f"gristmill resume {status.job_id}"
    return None


def to_retry_command(status: JobStatus) -> str | None:
    """The command that runs the failed rows again; None while there are none, or the job is under way."""
    is_over = status.state in TERMINAL_JOB_STATES
    return f"gristmill retry {status.job_id}" if is_over and status.failed else None


def to_status_text(status: JobStatus, is_live: bool | None = None) -> str:
    """The table of `status`, and of a run's end; is_live as for to_status_payload."""
    live = status.is_live if is_live is None else is_live
    rows = (
        f"{status.rows:,}: {status.completed:,} completed, {status.failed:,} failed, "
        f"{status.skipped:,} skipped, {status.not_run:,} not run"
    )
    saved = f"{status.cached_tokens:,} saved, {to_share_text(status.saved_tokens_share)}"
    lines = [
        (status.job_id, to_state_text(status, live)),
        ("model", status.model),
        ("queue", to_queue_text(status)),
        ("rows", rows),
        ("errors", to_counts_text(status.errors_by_code)),
        ("ended by", to_counts_text(status.finish_reasons)),
        ("tokens", f"{status.prompt_tokens:,} in ({saved}), {status.completion_tokens:,} out"),
        ("regrouped", to_regrouped_text(status.regrouped)),
        ("speed", to_speed_text(status)),
        ("engine", to_engine_text(status)),
        *to_percentile_lines(status.percentiles),
        ("output", status.output),
        ("go on with", to_resume_command(status, live) or ""),
        ("failed rows", to_retry_command(status) or ""),
    ]
    head, *rest = ((label, text) for label, text in lines if text)
    return to_fields_text("  ".join(head), rest)


def to_regrouped_text(regrouped: Mapping[str, Any] | None) -> str:
    """What sorting the rows by prefix saves of the prompt text; empty where they were not sorted."""
    if regrouped is None:
        return ""
    before = regrouped.get("sample_in_order")
    instead = "" if before is None else f" instead of {before:.0%} in input order (sample)"
    return f"by prefix: sorted rows share {regrouped['sorted_whole']:.0%} of the prompt text{instead}"


def to_state_text(status: JobStatus, is_live: bool) -> str:
    """The state, how long the job was worked on, and what there is to say about it."""
    elapsed_s = status.elapsed_s
    text = f"{status.state} after {f'{elapsed_s:.1f} s' if elapsed_s < 60 else to_duration_text(elapsed_s)}"
    if status.message:
        text += f": {status.message}"
    if status.state in TERMINAL_JOB_STATES:
        return text
    if status.runner == Runner.WORKERS:
        text += to_worker_text(status, is_live)
    elif not is_live:
        return f"{text}, no process works on it"
    left = f", {to_duration_text(status.eta_s)} left" if status.eta_s is not None else ""
    return f"{text}{left}" + (f", {status.owner}" if status.owner else "")


def to_worker_text(status: JobStatus, is_live: bool) -> str:
    """Who works on a submitted job that is not over."""
    if status.state == JobState.VALIDATING:
        return ", to be planned" if is_live else f", no worker offers {status.model} at present"
    if status.num_workers:
        return f", {status.num_workers} worker{'s' if status.num_workers > 1 else ''}"
    if status.state != JobState.IN_PROGRESS:
        return ""
    if is_live:
        return ", waits for a worker"
    with_weights = " with the weights that the job began with" if status.fingerprint else ""
    return f", no worker offers {status.model}{with_weights} at present"


def to_queue_text(status: JobStatus) -> str:
    """What the submission asked for; empty for a job of `gristmill run`."""
    if status.runner != Runner.WORKERS:
        return ""
    parts = [f"{status.priority} priority"]
    if status.not_before is not None:
        parts.append(f"not before {to_time_text(status.not_before)}")
    if status.deadline_at is not None:
        parts.append(f"deadline {to_time_text(status.deadline_at)}")
    if status.idempotency_key is not None:
        parts.append(f"key {status.idempotency_key}")
    return ", ".join(parts)


def to_progress(status: JobStatus) -> Progress:
    """What a display shows of a job that other processes run."""
    return Progress(
        rows_done=status.rows_done,
        rows_total=status.rows,
        rows_failed=status.failed,
        prompt_tokens=status.prompt_tokens,
        completion_tokens=status.completion_tokens,
        cached_tokens=status.cached_tokens,
    )


def to_speed_text(status: JobStatus) -> str:
    """Empty before anything was measured."""
    rates = (
        (status.completion_tokens_per_s, "output tokens/s"),
        (status.tokens_per_s, "tokens/s in and out"),
        (status.rows_per_s, "rows/s"),
    )
    return ", ".join(f"{to_number_text(rate)} {unit}" for rate, unit in rates if rate is not None)


def to_engine_text(status: JobStatus) -> str:
    """How well the engine was used: a rise in any of these says where throughput goes."""
    parts = [f"{status.preemptions:,} preemptions"]
    if status.kv_waste is not None:
        parts.append(f"KV waste {to_share_text(status.kv_waste)}")
    if status.step_budget_utilization is not None:
        parts.append(f"step budget {to_share_text(status.step_budget_utilization)} used while rows wait")
    return ", ".join(parts)


def to_percentile_lines(percentiles: dict[str, dict[str, float | None]]) -> list[tuple[str, str]]:
    """One line a measure that has values, under one line of heads."""
    measured = {
        label: percentiles[name]
        for name, label in PERCENTILE_LABELS.items()
        if any(value is not None for value in percentiles.get(name, {}).values())
    }
    lines = [(label, columns(map(to_seconds_text, row.values()))) for label, row in measured.items()]
    heads = [("latency", columns(next(iter(measured.values()))))] if measured else []
    return heads + lines


def to_jobs_text(statuses: Sequence[JobStatus]) -> str:
    """The table of `list`."""
    if not statuses:
        return "no jobs yet: `gristmill run --help` shows how to start one"
    heads = ("JOB", "STATE", "ROWS DONE", "FAILED", "CREATED", "OUTPUT")
    rows = [
        (
            status.job_id,
            status.state,
            f"{status.rows_done:,}/{status.rows:,}",
            f"{status.failed:,}",
            to_time_text(status.created_at) or "",
            status.output,
        )
        for status in statuses
    ]
    return to_text(build_table(heads, rows))


def to_workers_text(workers: Sequence[WorkerRecord]) -> str:
    """The table of `workers`."""
    if not workers:
        return "no worker yet: `gristmill worker --help` shows how to start one"
    heads = ("WORKER", "PROCESS", "STATE", "SHARDS", "ROWS", "SEEN", "MODELS")
    rows = [
        (
            worker.worker_id,
            str(worker.owner),
            f"{worker.state}: {worker.message}" if worker.message else worker.state,
            f"{worker.num_shards:,}",
            f"{worker.num_rows_in_flight:,}",
            to_time_text(worker.seen_at) or "",
            ", ".join(dict.fromkeys(model.name for model in worker.models)),
        )
        for worker in workers
    ]
    return to_text(build_table(heads, rows))


def to_worker_payload(worker: WorkerRecord) -> dict[str, Any]:
    """One worker of `workers --json`."""
    payload = asdict(worker) | {
        "owner": str(worker.owner),
        "models": [model._asdict() for model in worker.models],
    }
    return payload | {name: to_time_text(payload[name]) for name in WORKER_TIMES}


def columns(cells: Iterable[str]) -> str:
    """Cells of one line, each eight wide."""
    return "  ".join(f"{cell:>8}" for cell in cells)


def to_counts_text(counts: dict[str, int]) -> str:
    """`11 invalid_json, 5 null_value`: the most frequent first."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {name}" for name, count in ranked)


def to_time_text(time_s: float | None) -> str | None:
    """ISO 8601 in UTC, to the second."""
    return None if time_s is None else datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
