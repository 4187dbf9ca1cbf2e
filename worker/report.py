"""A job's figures for people (a short table) and for programs (`--json`), from the database only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from jobs.records import JobStatus
from jobs.states import RESUMABLE_JOB_STATES, TERMINAL_JOB_STATES
from worker.progress import to_duration_text

LABEL_WIDTH = 13
PERCENTILE_LABELS = {
    "queue_wait_s": "queue wait",
    "time_to_first_token_s": "first token",
    "time_per_token_s": "per token",
}
TIMES = ("created_at", "started_at", "finished_at")


def to_status_payload(status: JobStatus, is_live: bool) -> dict[str, Any]:
    """What `status --json` prints. Times are ISO 8601 in UTC; durations are seconds; shares lie in 0..1."""
    payload = asdict(status)
    for name in TIMES:
        payload[name] = to_time_text(payload[name])
    payload["is_live"] = is_live
    payload["resume"] = to_resume_command(status, is_live)
    return payload


def to_resume_command(status: JobStatus, is_live: bool) -> str | None:
    """The command that goes on with the job; None where nothing is left to do or a process is at it."""
    if status.state in RESUMABLE_JOB_STATES or (status.state not in TERMINAL_JOB_STATES and not is_live):
        return f"gristmill resume {status.job_id}"
    return None


def to_status_text(status: JobStatus, is_live: bool) -> str:
    """The table of `status`, and of a run's end."""
    rows = (
        f"{status.rows:,}: {status.completed:,} completed, {status.failed:,} failed, "
        f"{status.skipped:,} skipped, {status.not_run:,} not run"
    )
    saved = f"{status.cached_tokens:,} saved, {to_share_text(status.saved_tokens_share)}"
    lines = [
        (status.job_id, to_state_text(status, is_live)),
        ("model", status.model),
        ("rows", rows),
        ("errors", to_counts_text(status.errors_by_code)),
        ("ended by", to_counts_text(status.finish_reasons)),
        ("tokens", f"{status.prompt_tokens:,} in ({saved}), {status.completion_tokens:,} out"),
        ("speed", to_speed_text(status)),
        ("engine", to_engine_text(status)),
        *to_percentile_lines(status.percentiles),
        ("output", status.output),
        ("go on with", to_resume_command(status, is_live) or ""),
    ]
    head, *rest = ((label, text) for label, text in lines if text)
    return "\n".join(
        [f"{head[0]}  {head[1]}", *(f"  {label:<{LABEL_WIDTH}} {text}".rstrip() for label, text in rest)]
    )


def to_state_text(status: JobStatus, is_live: bool) -> str:
    """The state, how long the job was worked on, and what there is to say about it."""
    elapsed_s = status.elapsed_s
    text = f"{status.state} after {f'{elapsed_s:.1f} s' if elapsed_s < 60 else to_duration_text(elapsed_s)}"
    if status.message:
        text += f": {status.message}"
    if status.state in TERMINAL_JOB_STATES:
        return text
    if not is_live:
        return f"{text}, no process works on it"
    left = f", {to_duration_text(status.eta_s)} left" if status.eta_s is not None else ""
    return f"{text}{left}" + (f", {status.owner}" if status.owner else "")


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
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (heads, *rows)
    )


def columns(cells: Iterable[str]) -> str:
    return "  ".join(f"{cell:>8}" for cell in cells)


def to_counts_text(counts: dict[str, int]) -> str:
    """`11 invalid_json, 5 null_value`: the most frequent first."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {name}" for name, count in ranked)


def to_time_text(time_s: float | None) -> str | None:
    """ISO 8601 in UTC, to the second."""
    return None if time_s is None else datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_share_text(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def to_number_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def to_seconds_text(seconds: float | None) -> str:
    """`340 us`, `1.2 ms`, `4.56 s`, `12:05`: three figures at most."""
    if seconds is None:
        return "-"
    if seconds >= 100:
        return to_duration_text(seconds)
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:#.3g}".rstrip(".") + f" {unit}"
    return "0 s"
