"""Which jobs are regrouped by prefix, and what a regrouped job holds: every row where it came from, nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.jobs.errors import SourceUnavailable
from gristmill.jobs.output.finalize import finalize_job
from gristmill.jobs.output.parts import load_done_rows, strip_errors, write_attempt
from gristmill.jobs.output.publishing import publish_part
from gristmill.jobs.output.schema import load_part_schema
from gristmill.jobs.owner import current_owner
from gristmill.jobs.plan import pieces as plan_pieces
from gristmill.jobs.plan.planner import plan_one_piece, plan_submitted_job
from gristmill.jobs.records import JobRecord, ShardClaim
from gristmill.jobs.regroup import regroup
from gristmill.jobs.regroup import sample as regroup_sample
from gristmill.jobs.regroup.spool import list_spool, load_spool_rows, new_spool_id, write_spool
from gristmill.jobs.results import Result
from gristmill.jobs.rows import Row
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.states import JobState
from gristmill.jobs.stats import JobStats, ShardCounts
from gristmill.jobs.storage.folder import Storage, open_storage
from gristmill.jobs.store.store import Store
from tests.jobs.cases import ELSEWHERE, OFFER, OTHER_PLACE, Clock

OWNER = current_owner()
PROMPT = "{{ document }} {{ question }}"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    return folder


def build_rows(num_rows: int, num_documents: int, is_shuffled: bool = True) -> list[dict[str, Any]]:
    """Questions about documents of 400 characters."""
    documents = [random.Random(i).randbytes(200).hex() for i in range(num_documents)]
    rows = [
        {"document": documents[i * num_documents // num_rows], "question": f"question {i}", "other": i}
        for i in range(num_rows)
    ]
    if is_shuffled:
        random.Random(9).shuffle(rows)
    return rows


def write_jsonl(folder: Path, rows: Sequence[dict[str, Any] | str], name: str = "a.jsonl") -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / name).write_text("".join(line + "\n" for line in lines))


def submit(store: Store, data: Path, output: str | None = None, **spec: Any) -> JobRecord:
    place = output or str(data.parent / "out")
    given = {"input": [f"{data}/*"], "output": place, "model": "null", "prompt": PROMPT, "shard_rows": 600}
    return store.submissions.submit(JobSpec(**(given | spec))).job


def plan(store: Store, job: JobRecord, data: Path) -> JobRecord:
    pieces = plan_submitted_job(store, job.job_id, OWNER, [str(data.parent), "s3://"])
    for piece in pieces:
        plan_one_piece(store, job.job_id, piece)
    return store.jobs.load(job.job_id)


def is_regrouped(store: Store, job: JobRecord) -> bool:
    shards = store.shards.spooled(job.job_id)
    assert len(shards) in (0, store.jobs.load(job.job_id).num_shards)
    return bool(shards)


def read_claim(storage: Storage, claim: ShardClaim) -> list[Row]:
    return [row for rows in load_spool_rows(storage, claim.range) for row in rows]


def run_claim(store: Store, storage: Storage, job: JobRecord, claim: ShardClaim, failing: str = "") -> None:
    """Computes what is left of a shard; rows with `failing` in their question are errors."""
    schema, done = load_part_schema(job.part_schema), set()
    output_format = str(job.spec["output_format"])
    if claim.strip_errors:
        part, counts, stats = strip_errors(storage, claim, schema, job.sources, output_format)
        assert store.shards.commit(claim, part, counts, stats, clear_strip=True)
        claim = ShardClaim(*(part if name == "part" else getattr(claim, name) for name in _CLAIM_FIELDS))
    done = load_done_rows(storage, claim.part, job.sources)
    rows = [row for row in read_claim(storage, claim) if (row.source_index, row.row_index) not in done]
    results, counts = [], ShardCounts()
    for row in rows:
        question = (row.values or {}).get("question")
        is_error = row.error is not None or bool(failing and failing in str(question))
        fault = (
            {"error_code": "invalid_json", "error_message": "no"} if is_error else {"completion": question}
        )
        results.append(Result(row.source_index, row.row_index, row.custom_id, **fault))
        counts.failed += is_error
        counts.completed += not is_error
    part = write_attempt(storage, claim, results, schema, job.sources, output_format)
    stats = JobStats(errors_by_code={"invalid_json": counts.failed} if counts.failed else {})
    assert store.shards.commit(claim, part, counts, stats, complete=True)
    publish_part(storage, store.shards, claim.shard_id, part)


_CLAIM_FIELDS = ("shard_id", "job_id", "fence", "attempt_id", "owner", "range", "part", "crash_count")


def run(store: Store, job: JobRecord, failing: str = "") -> None:
    storage = open_storage(job.output)
    while claim := store.claims.next(OFFER, ELSEWHERE):
        run_claim(store, storage, job, claim, failing)
    assert finalize_job(store, storage, job.job_id, OWNER) is JobState.COMPLETED


def read_output(job: JobRecord) -> dict[tuple[str, int], str | None]:
    storage = open_storage(job.output)
    found: list[tuple[tuple[str, int], str | None]] = []
    for name in storage.names():
        if name.startswith("part-"):
            with storage.open(name) as file:
                if name.endswith(".parquet"):
                    rows = pq.read_table(file).to_pylist()
                else:
                    rows = [json.loads(line) for line in file]
                keys = [(row["source"], row["row_index"]) for row in rows]
                assert keys == sorted(keys)
                found += [(key, row["completion"]) for key, row in zip(keys, rows, strict=True)]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.mark.parametrize(
    ("num_documents", "is_shuffled", "expected"),
    [(60, True, True), (60, False, False), (6000, True, False), (1, True, False)],
)
def test_rows_of_shuffled_documents_are_regrouped_and_others_are_not(
    store: Store, data: Path, num_documents: int, is_shuffled: bool, expected: bool
) -> None:
    write_jsonl(data, build_rows(6000, num_documents * 10 if expected else num_documents, is_shuffled))
    job = plan(store, submit(store, data), data)
    assert job.state is JobState.IN_PROGRESS and job.num_rows == 6000
    assert is_regrouped(store, job) == expected
    assert (list_spool(open_storage(job.output)) != []) == expected


@pytest.mark.parametrize("spec", [{"regroup": "never"}, {"shard_rows": 6000}])
def test_a_job_is_left_as_it_is_where_that_is_asked_or_one_shard_has_it_all(
    store: Store, data: Path, spec: dict[str, Any]
) -> None:
    write_jsonl(data, build_rows(6000, 600))
    assert not is_regrouped(store, plan(store, submit(store, data, **spec), data))


def test_an_input_over_the_limit_stays_as_it_is_unless_it_must_be_regrouped(
    store: Store, data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(regroup, "MAX_INPUT_BYTES", 1000)
    write_jsonl(data, build_rows(6000, 600))
    assert not is_regrouped(store, plan(store, submit(store, data), data))
    assert "not regrouped by prefix: the input has" in caplog.text
    other = str(data.parent / "other")
    assert is_regrouped(store, plan(store, submit(store, data, other, regroup="always"), data))


def test_a_large_input_is_judged_by_a_sample(
    store: Store, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regroup_sample, "MAX_SAMPLE_ROWS", 3000)
    table = pa.Table.from_pylist(build_rows(12_000, 1200))
    pq.write_table(table, data / "a.parquet", row_group_size=2500)
    write_jsonl(data, build_rows(12_000, 1200)[::-1], "b.jsonl")
    assert is_regrouped(store, plan(store, submit(store, data), data))


@pytest.mark.parametrize(("output_format", "place"), [("parquet", "local"), ("jsonl", "s3")])
def test_every_row_of_a_regrouped_job_comes_out_once_and_its_failed_rows_again(
    store: Store, data: Path, output_format: str, place: str, request: pytest.FixtureRequest
) -> None:
    rows = build_rows(900, 60)
    write_jsonl(data, [*rows[:300], "{broken", "", *rows[300:500]])
    pq.write_table(pa.Table.from_pylist(rows[500:]), data / "b.parquet")
    output = f"{request.getfixturevalue('s3_root')}/out" if place == "s3" else None
    order = submit(store, data, output, regroup="always", shard_rows=100, output_format=output_format)
    job = plan(store, order, data)
    a, b = (source.uri for source in job.sources)
    expected: dict[tuple[str, int], str | None] = {(a, i): rows[i]["question"] for i in range(300)}
    expected |= {(a, 300): None, **{(a, i + 2): rows[i]["question"] for i in range(300, 500)}}
    expected |= {(b, i): row["question"] for i, row in enumerate(rows[500:])}
    run(store, job, failing="question 7")
    failed = {key for key, question in expected.items() if question is None or "question 7" in question}
    assert read_output(job) == expected | dict.fromkeys(failed)
    storage = open_storage(job.output)
    kept = list_spool(storage)
    assert kept and all("-failed-" in name for name in kept)
    assert store.ends.retry_failed(job.job_id) == len(failed)
    run(store, job, failing="question 77")
    failed = {key for key, question in expected.items() if question is None or "question 77" in question}
    assert read_output(job) == expected | dict.fromkeys(failed)
    assert len(list_spool(storage)) < len(kept)
    assert store.ends.retry_failed(job.job_id) == len(failed)
    run(store, job)
    assert read_output(job) == expected
    assert [name.split("-")[-1] for name in list_spool(storage)] == [
        f"{shard.range.shard_index:05d}" for shard in store.shards.spooled(job.job_id) if shard.rows_failed
    ]


def test_a_job_without_failed_rows_leaves_no_spool(store: Store, data: Path) -> None:
    write_jsonl(data, build_rows(300, 20))
    job = plan(store, submit(store, data, regroup="always", shard_rows=100), data)
    storage = open_storage(job.output)
    write_spool(storage, new_spool_id(), [], 10, is_exact=True)
    storage.put("_spool/of-a-planner-that-died", b"rows")
    run(store, job)
    assert "_spool" not in storage.names()


def test_rows_that_make_no_prompt_come_last(store: Store, data: Path) -> None:
    rows: list[Any] = build_rows(100, 5)
    write_jsonl(data, ["{", {"document": None, "question": "x"}, *rows])
    job = plan(store, submit(store, data, regroup="always", shard_rows=102), data)
    claim = store.claims.next(OFFER, ELSEWHERE)
    assert claim is not None
    found = read_claim(open_storage(job.output), claim)
    assert [row.row_index for row in found[-2:]] == [0, 1]
    prompts = [f"{row.values['document']} {row.values['question']}" for row in found[:-2] if row.values]
    assert prompts == sorted(prompts) and len(prompts) == 100


def test_neighbours_in_the_spool_are_claimed_one_after_the_other(store: Store, data: Path) -> None:
    write_jsonl(data, build_rows(400, 10))
    plan(store, submit(store, data, regroup="always", shard_rows=100), data)
    claims = [store.claims.next(OFFER, (ELSEWHERE, OTHER_PLACE)[i % 2]) for i in range(4)]
    firsts = [claim.range.first_row for claim in claims if claim is not None]
    assert firsts == [0, 100, 200, 300]


def test_values_that_a_spool_can_not_hold_leave_the_job_as_it_is(
    store: Store, data: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"document": ["x"] * 20, "question": [date(2026, 1, 1)] * 20})
    pq.write_table(table, data / "a.parquet")

    def refuse(*_: object) -> bytes:
        raise regroup.ValueTypeError("strange.Type")  # type: ignore[attr-defined]

    monkeypatch.setattr(regroup, "to_record", refuse)
    job = plan(store, submit(store, data, regroup="always"), data)
    assert job.state is JobState.IN_PROGRESS and not is_regrouped(store, job)
    assert "a column holds values of type strange.Type" in caplog.text
    assert list_spool(open_storage(job.output)) == []


def test_an_outage_while_rows_are_sorted_leaves_nothing_and_the_next_try_starts_anew(
    store: Store, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(data, build_rows(300, 20))
    job = submit(store, data, regroup="always", shard_rows=100)

    def fail(*_: object) -> object:
        raise SourceUnavailable("the place does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(regroup, "load_rows", fail)
        with pytest.raises(SourceUnavailable):
            plan(store, job, data)
    assert store.jobs.load(job.job_id).state is JobState.VALIDATING
    assert list_spool(open_storage(job.output)) == []
    assert is_regrouped(store, plan(store, job, data))


def test_a_job_that_is_stopped_while_rows_are_sorted_leaves_no_spool(
    store: Store, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(data, build_rows(300, 20))
    job = submit(store, data, regroup="always", shard_rows=100)
    monkeypatch.setattr(regroup, "BEAT_EVERY_S", -1.0)
    renew, calls = store.plans.renew, []

    def stop_late(job_id: str, owner: Any) -> bool:
        calls.append(job_id)
        if len(calls) == 350:
            store.ends.stop(job_id, JobState.CANCELLED)
        return renew(job_id, owner)

    monkeypatch.setattr(store.plans, "renew", stop_late)
    assert plan(store, job, data).state is JobState.CANCELLING
    assert len(calls) == 350
    assert list_spool(open_storage(job.output)) == []


def test_a_new_job_clears_the_old_spool_and_keeps_its_own(store: Store, data: Path, clock: Clock) -> None:
    write_jsonl(data, build_rows(300, 20))
    first = plan(store, submit(store, data, regroup="always", shard_rows=100), data)
    store.ends.stop(first.job_id, JobState.CANCELLED)
    store.ends.drain_stopped()
    storage = open_storage(first.output)
    assert len(list_spool(storage)) == 1  # a stopped job may be resumed
    clock.now += 1.0  # jobs of one moment have no order
    second = plan(store, submit(store, data, regroup="always", if_exists="overwrite", shard_rows=50), data)
    assert second.state is JobState.IN_PROGRESS and len(list_spool(storage)) == 1
    run(store, second)
    assert len(read_output(second)) == 300


def test_a_stopped_job_goes_on_from_its_spool(store: Store, data: Path) -> None:
    write_jsonl(data, build_rows(300, 20))
    job = plan(store, submit(store, data, regroup="always", shard_rows=100), data)
    claim = store.claims.next(OFFER, ELSEWHERE)
    assert claim is not None
    run_claim(store, open_storage(job.output), job, claim)
    store.ends.stop(job.job_id, JobState.CANCELLED)
    store.ends.drain_stopped()
    assert store.ends.resume(job.job_id) is JobState.IN_PROGRESS
    run(store, job)
    assert len(read_output(job)) == 300


def test_a_job_planned_in_pieces_is_regrouped_by_one_worker_at_a_time(
    store: Store, data: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_pieces, "MAX_INLINE_BYTES", 1000)
    write_jsonl(data, build_rows(300, 20))
    job = submit(store, data, regroup="always", shard_rows=100)
    assert plan_submitted_job(store, job.job_id, OWNER, [str(data.parent)]) == [0]
    assert store.plans.claim_start(job.job_id, ELSEWHERE)
    assert not plan_one_piece(store, job.job_id, 0)  # the other one is at it
    clock.now += 61
    assert store.pieces.waiting() == [(job.job_id, 0)]  # it died
    assert not store.plans.renew(job.job_id, ELSEWHERE)
    assert plan_one_piece(store, job.job_id, 0)
    assert is_regrouped(store, job)
    run(store, store.jobs.load(job.job_id))
    assert len(read_output(job)) == 300


def test_what_was_found_is_in_the_jobs_history(
    store: Store, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    write_jsonl(data, build_rows(6000, 600))
    job = plan(store, submit(store, data), data)
    assert "regrouped by prefix: sample saves" in caplog.text
    found = store.jobs.status(job.job_id).regrouped
    assert found is not None
    assert found["sample_in_order"] + 0.1 < found["sample_sorted"] <= 1.0
    assert found["sorted_whole"] == pytest.approx(found["sample_sorted"], abs=0.02)
