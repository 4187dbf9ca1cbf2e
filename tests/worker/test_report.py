"""The tables of status and list, and the JSON payload."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gristmill.jobs.owner import Owner
from gristmill.jobs.records import JobStatus, WorkerModel, WorkerRecord
from gristmill.worker.show.progress import Progress
from gristmill.worker.show.report import (
    to_jobs_text,
    to_progress,
    to_resume_command,
    to_retry_command,
    to_status_payload,
    to_status_text,
    to_worker_payload,
    to_workers_text,
)
from gristmill.worker.show.tables import to_seconds_text

NOW = 1_760_000_000.0
PERCENTILES: dict[str, dict[str, float | None]] = {
    "queue_wait_s": {"p50": 0.00034, "p95": 1.25, "p99": 125.0},
    "time_to_first_token_s": {"p50": 0.012, "p95": 12.0, "p99": 99.94},
    "time_per_token_s": {"p50": 0.0, "p95": None, "p99": 0.5},
}
COMPLETED = JobStatus(
    job_id="job_a",
    state="completed",
    message=None,
    model="model.gguf",
    output="/out",
    fingerprint="f00d",
    owner=None,
    created_at=1_760_000_000.4,
    started_at=1_760_000_001.0,
    finished_at=1_760_000_084.0,
    elapsed_s=83.0,
    eta_s=None,
    rows=1200,
    rows_done=1200,
    completed=1180,
    failed=18,
    skipped=2,
    not_run=0,
    errors_by_code={"null_value": 5, "invalid_json": 11, "missing_column": 2},
    finish_reasons={"stop": 7, "length": 30},
    prompt_tokens=120_000,
    completion_tokens=64_000,
    cached_tokens=45_600,
    rows_per_s=14.46,
    tokens_per_s=2217.0,
    completion_tokens_per_s=771.0,
    saved_tokens_share=0.38,
    preemptions=3,
    kv_waste=0.0213,
    step_budget_utilization=0.914,
    percentiles=PERCENTILES,
    shards={"done": 5},
)
NOTHING: dict[str, Any] = dict.fromkeys(
    ("rows_done", "completed", "failed", "skipped", "prompt_tokens", "completion_tokens", "cached_tokens"), 0
) | dict.fromkeys(
    ("started_at", "finished_at", "rows_per_s", "tokens_per_s", "completion_tokens_per_s", "saved_tokens_share",
     "kv_waste", "step_budget_utilization")
)  # fmt: skip
EMPTY = replace(
    COMPLETED,
    state="in_progress",
    elapsed_s=0.0,
    not_run=1200,
    errors_by_code={},
    finish_reasons={},
    preemptions=0,
    percentiles={name: dict.fromkeys(("p50", "p95", "p99")) for name in PERCENTILES},
    **NOTHING,
)
SUBMITTED = replace(
    EMPTY,
    runner="workers",
    model="smollm2",
    priority="high",
    idempotency_key="night-12",
    not_before=NOW,
    deadline_at=NOW + 3600,
    elapsed_s=10.0,
    eta_s=75.0,
    num_workers=2,
    is_live=True,
)
HELD = replace(EMPTY, owner="process 12 on box")
RESUMABLE = ("failed", "cancelled", "expired", "in_progress", "finalizing")
WORKER = WorkerRecord(
    worker_id="w1",
    owner=Owner("box/4026", "boot", 12, 99),
    version="0.1.0",
    state="busy",
    models=(WorkerModel("tiny", "f00d", "float32", True), WorkerModel("tiny", "beef", "bfloat16", False)),
    num_shards=2,
    num_rows_in_flight=1024,
    started_at=NOW,
    seen_at=NOW + 60,
    stopped_at=None,
    message=None,
)


def test_the_table_of_a_completed_job_has_every_figure() -> None:
    assert to_status_text(COMPLETED, is_live=False).splitlines() == [
        "job_a  completed after 1:23",
        "  model         model.gguf",
        "  rows          1,200: 1,180 completed, 18 failed, 2 skipped, 0 not run",
        "  errors        11 invalid_json, 5 null_value, 2 missing_column",
        "  ended by      30 length, 7 stop",
        "  tokens        120,000 in (45,600 saved, 38.0%), 64,000 out",
        "  speed         771 output tokens/s, 2,217 tokens/s in and out, 14.5 rows/s",
        "  engine        3 preemptions, KV waste 2.1%, step budget 91.4% used while rows wait",
        "  latency            p50       p95       p99",
        "  queue wait      340 us    1.25 s      2:05",
        "  first token    12.0 ms    12.0 s    99.9 s",
        "  per token          0 s         -    500 ms",
        "  output        /out",
        "  failed rows   gristmill retry job_a",
    ]


def test_a_job_that_did_nothing_yet_shows_no_empty_figures() -> None:
    text = to_status_text(EMPTY, is_live=True)
    for word in ("latency", "speed", "errors", "None", "nan"):
        assert word not in text
    assert "1,200 not run" in text


@pytest.mark.parametrize(
    ("status", "is_live", "line"),
    [
        (
            replace(HELD, elapsed_s=10.0, eta_s=75.0),
            True,
            "in_progress after 10.0 s, 1:15 left, process 12 on box",
        ),
        (HELD, False, "in_progress after 0.0 s, no process works on it"),
        (
            replace(EMPTY, state="failed", message="12 rows failed"),
            False,
            "failed after 0.0 s: 12 rows failed",
        ),
        (SUBMITTED, None, "in_progress after 10.0 s, 2 workers, 1:15 left"),
    ],
)
def test_the_first_line_says_how_far_the_job_is_and_who_works_on_it(
    status: JobStatus, is_live: bool | None, line: str
) -> None:
    assert to_status_text(status, is_live).splitlines()[0] == f"job_a  {line}"


@pytest.mark.parametrize(
    ("status", "is_live", "can_resume"),
    [
        *((replace(EMPTY, state=state), False, True) for state in RESUMABLE),
        (EMPTY, True, False),
        (COMPLETED, False, False),
        (SUBMITTED, False, False),
        (replace(SUBMITTED, state="expired"), False, True),
    ],
)
def test_what_can_be_resumed_says_how(status: JobStatus, is_live: bool, can_resume: bool) -> None:
    command = "gristmill resume job_a" if can_resume else None
    assert to_resume_command(status, is_live) == to_status_payload(status, is_live)["resume"] == command
    assert ("\n  go on with    gristmill resume job_a" in to_status_text(status, is_live)) == can_resume


def test_a_submitted_job_shows_what_was_asked_for() -> None:
    assert to_status_text(SUBMITTED).splitlines()[2] == (
        "  queue         high priority, not before 2025-10-09T08:53:20Z, deadline 2025-10-09T09:53:20Z, key night-12"
    )
    assert "queue " not in to_status_text(replace(SUBMITTED, runner="local")).partition("queue wait")[0]


@pytest.mark.parametrize(
    ("state", "num_workers", "is_live", "words"),
    [
        ("validating", 0, True, ", to be planned, "),
        ("validating", 0, False, ", no worker offers smollm2 at present, "),
        ("in_progress", 1, True, ", 1 worker, "),
        ("in_progress", 0, True, ", waits for a worker, "),
        (
            "in_progress",
            0,
            False,
            ", no worker offers smollm2 with the weights that the job began with at present, ",
        ),
        ("cancelling", 2, True, ", 2 workers, "),
        ("finalizing", 0, True, " after 10.0 s, 1:15 left"),
    ],
)
def test_a_submitted_job_says_who_works_on_it(
    state: str, num_workers: int, is_live: bool, words: str
) -> None:
    status = replace(SUBMITTED, state=state, num_workers=num_workers, is_live=is_live)
    assert words in to_status_text(status).splitlines()[0]


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({}, "gristmill retry job_a"),
        ({"state": "expired"}, "gristmill retry job_a"),
        ({"state": "in_progress"}, None),
        ({"failed": 0}, None),
    ],
)
def test_failed_rows_of_a_job_that_is_over_can_be_tried_again(
    changes: dict[str, Any], command: str | None
) -> None:
    assert to_retry_command(replace(COMPLETED, **changes)) == command


def test_a_display_shows_what_the_database_says() -> None:
    assert to_progress(COMPLETED) == Progress(1200, 1200, 18, 120_000, 64_000, 45_600)


def test_workers_are_one_line_each_with_their_models_once() -> None:
    ill = replace(WORKER, worker_id="worker2", state="stopped", message="the canary died", models=())
    assert to_workers_text([WORKER, ill]).splitlines() == [
        "WORKER   PROCESS            STATE                     SHARDS  ROWS   SEEN                  MODELS",
        "w1       process 12 on box  busy                      2       1,024  2025-10-09T08:54:20Z  tiny",
        "worker2  process 12 on box  stopped: the canary died  2       1,024  2025-10-09T08:54:20Z",
    ]
    assert "gristmill worker" in to_workers_text([])


def test_a_worker_as_json_has_texts_for_its_owner_and_times() -> None:
    payload = json.loads(json.dumps(to_worker_payload(WORKER)))
    assert (payload["owner"], payload["seen_at"]) == ("process 12 on box", "2025-10-09T08:54:20Z")
    assert payload["stopped_at"] is None
    assert payload["models"][0] == dict(name="tiny", fingerprint="f00d", dtype="float32", is_loaded=True)


def test_the_payload_is_json_with_the_same_figures_and_nulls_for_those_not_known() -> None:
    payload = json.loads(json.dumps(to_status_payload(COMPLETED, is_live=False)))
    assert (payload["created_at"], payload["finished_at"]) == ("2025-10-09T08:53:20Z", "2025-10-09T08:54:44Z")
    assert payload["rows"] == sum(payload[name] for name in ("completed", "failed", "skipped", "not_run"))
    assert payload["percentiles"] == PERCENTILES and payload["errors_by_code"]["invalid_json"] == 11
    assert (payload["is_live"], payload["retry"]) == (False, "gristmill retry job_a")
    payload = json.loads(json.dumps(to_status_payload(SUBMITTED)))
    assert (payload["deadline_at"], payload["started_at"]) == ("2025-10-09T09:53:20Z", None)
    assert (payload["runner"], payload["num_workers"], payload["is_live"]) == ("workers", 2, True)
    assert payload["tokens_per_s"] is None


def test_the_list_is_one_aligned_line_a_job() -> None:
    older = replace(EMPTY, job_id="job_older", rows_done=64, failed=1, output="/elsewhere")
    assert to_jobs_text([COMPLETED, older]).splitlines() == [
        "JOB        STATE        ROWS DONE    FAILED  CREATED               OUTPUT",
        "job_a      completed    1,200/1,200  18      2025-10-09T08:53:20Z  /out",
        "job_older  in_progress  64/1,200     1       2025-10-09T08:53:20Z  /elsewhere",
    ]
    assert "gristmill run" in to_jobs_text([])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0, "0 s"), (2e-6, "2.00 us"), (0.0123, "12.3 ms"), (0.5, "500 ms"),
     (1.0, "1.00 s"), (99.99, "100 s")],
)  # fmt: skip
def test_a_latency_has_three_figures(seconds: float | None, text: str) -> None:
    assert to_seconds_text(seconds) == text
