"""From a submitted job to its queued shards: what is refused and why, pieces in any order, outages."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.jobs.errors import SourceUnavailable
from gristmill.jobs.input.sources import load_sources
from gristmill.jobs.output.schema import load_part_schema
from gristmill.jobs.owner import current_owner
from gristmill.jobs.plan import pieces as plan_pieces
from gristmill.jobs.plan import planner
from gristmill.jobs.plan.cutting import plan_shards
from gristmill.jobs.plan.order import build_prefix_key
from gristmill.jobs.plan.planner import plan_one_piece, plan_submitted_job
from gristmill.jobs.records import JobRecord, WorkerModel
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.states import JobState
from gristmill.jobs.storage.s3.client import s3_client, split_s3_uri
from gristmill.jobs.store.jobs import Jobs
from gristmill.jobs.store.store import Store
from tests.jobs.cases import ELSEWHERE, OFFER, OTHER_PLACE, Clock, claim_next

OWNER = current_owner()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b'{"prompt": "one", "n": 1}\n\n' * 300)
    return folder


def submit(store: Store, data: Path, name: str = "out", **spec: Any) -> JobRecord:
    given = {"input": [f"{data}/*"], "output": str(data.parent / name), "model": "null"} | spec
    return store.submissions.submit(JobSpec(**given)).job


def plan(store: Store, job: JobRecord, data: Path) -> list[int]:
    return plan_submitted_job(store, job.job_id, OWNER, [str(data.parent)])


def plan_new(store: Store, data: Path, name: str = "out", **spec: Any) -> JobRecord:
    job = submit(store, data, name, **spec)
    assert plan(store, job, data) == []
    return store.jobs.load(job.job_id)


def shard_rows(store: Store) -> list[int]:
    sizes = []
    while claim := store.claims.next(OFFER, ELSEWHERE):
        sizes.append(claim.range.num_rows)
    return sizes


def test_a_job_is_checked_planned_and_started(store: Store, data: Path) -> None:
    job = plan_new(store, data, prompt="Please sort this text: {{ prompt }}", keep=["n"])
    assert (job.state, job.num_rows, job.columns) == (JobState.IN_PROGRESS, 300, ("prompt", "n"))
    assert [source.name for source in job.sources] == ["a.jsonl"]
    assert "n" in load_part_schema(job.part_schema).names
    assert len(job.identity) == 32 and job.prefix_key is not None and job.fingerprint == ""
    ranges = [claim_next(store).range for _ in range(job.num_shards)]
    assert sum(found.num_rows for found in ranges) == 300
    assert ranges[1].first_row == ranges[0].num_records == 2 * ranges[0].num_rows - 1
    assert plan(store, job, data) == []  # a doubled message


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"input": ["a.jsonl"]}, "'a.jsonl': workers have another working folder"),
        ({"output": "out"}, "'out': workers have another working folder"),
        ({"input": ["/etc/*"]}, "'/etc/*' is not below what this worker may use"),
        ({"input": ["file:///etc/passwd"]}, "'file:///etc/passwd' is not below"),
        ({"output": "/etc/out"}, "'/etc/out' is not below"),
        ({"output": "s3://bucket/out"}, "is not below"),
        ({"input": ["{data}/no*"]}, "matches no file"),
        ({"input": ["{data}/a.jsonl", "{data}/../bad.parquet"]}, "as Parquet"),
        ({"prompt": "{{ text }}"}, "text"),
        ({"prompt": "{{ prompt"}, "--prompt"),
        ({"keep": ["x"]}, "--keep x: no such column"),
        ({"output": "{data}"}, "output folder"),
        ({"output": "file://{data}/../out"}, "write a path, or s3://"),
        ({"output": "{data}/../taken"}, "files not written by gristmill (letter.txt)"),
        ({"output": "{data}/../bad.parquet"}, "bad.parquet"),
    ],
)
def test_what_can_not_be_carried_out_fails_with_its_reason(
    store: Store, data: Path, spec: dict[str, Any], words: str
) -> None:
    (data.parent / "bad.parquet").write_bytes(b"PAR1")
    (data.parent / "taken").mkdir()
    (data.parent / "taken" / "letter.txt").write_text("dear")
    given = {
        name: [text.replace("{data}", str(data)) for text in value]
        if isinstance(value, list)
        else value.replace("{data}", str(data))
        for name, value in spec.items()
    }
    job = plan_new(store, data, **given)
    assert job.state is JobState.FAILED
    assert job.message is not None and words in job.message and "\n" not in job.message


def test_a_link_that_leads_out_of_the_roots_is_found_behind_a_glob(store: Store, data: Path) -> None:
    job = submit(store, data)
    (data.parent / "secret.jsonl").write_bytes(b"{}\n")
    (data / "b.jsonl").symlink_to(data.parent / "secret.jsonl")
    assert plan_submitted_job(store, job.job_id, OWNER, [str(data), job.output]) == []
    assert "b.jsonl' is not below" in (store.jobs.load(job.job_id).message or "")


def test_one_worker_plans_at_a_time(store: Store, data: Path, clock: Clock) -> None:
    job = submit(store, data)
    assert store.plans.claim(job.job_id, OTHER_PLACE) is not None
    assert plan(store, job, data) == []
    assert store.jobs.load(job.job_id).state is JobState.VALIDATING
    clock.now += 1000.0
    plan(store, job, data)
    assert store.jobs.load(job.job_id).state is JobState.IN_PROGRESS


@pytest.fixture
def large(data: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three sources, of which the first is cut in pieces of 1000 bytes."""
    monkeypatch.setattr(plan_pieces, "MAX_INLINE_SOURCES", 2)
    monkeypatch.setattr(planner, "cut_pieces", lambda sources: plan_pieces.cut_pieces(sources, 1000))
    pq.write_table(pa.table({"prompt": ["x"] * 2500}), data / "b.parquet")
    (data / "c.jsonl").write_bytes(b"\n\n")
    return [f"{data}/a.jsonl", f"{data}/b.parquet", f"{data}/c.jsonl"]


def test_a_large_job_is_planned_by_pieces_in_any_order(store: Store, data: Path, large: list[str]) -> None:
    job = submit(store, data, shard_rows=40)
    indexes = plan(store, job, data)
    assert indexes == list(range(11))
    assert plan(store, job, data) == []
    order = indexes * 2
    random.Random(7).shuffle(order)
    started = [plan_one_piece(store, job.job_id, index) for index in order]
    assert sum(started) == 1
    job = store.jobs.load(job.job_id)
    assert (job.state, job.num_rows, job.columns) == (JobState.IN_PROGRESS, 2800, ("prompt", "n"))
    ranges = [claim_next(store).range for _ in range(job.num_shards)]
    assert [found.shard_index for found in ranges] == list(range(job.num_shards))
    rows = {
        (found.source_index, found.first_row + index): 0
        for found in ranges
        for index in range(found.num_records)
    }
    whole = plan_shards(load_sources(large), 40)
    assert len(rows) == sum(found.num_records for found in ranges)
    assert sum(found.num_rows for found in ranges) == whole.num_rows
    assert not plan_one_piece(store, job.job_id, 0) and not plan_one_piece(store, "job_unknown", 0)


def test_a_plan_whose_last_step_was_lost_is_started_by_the_next_message(
    store: Store, data: Path, large: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(store, data)
    indexes = plan(store, job, data)
    with monkeypatch.context() as patch:
        patch.setattr(planner, "_start_from_pieces", lambda *_: False)
        assert not any(plan_one_piece(store, job.job_id, index) for index in indexes)
    assert plan_one_piece(store, job.job_id, indexes[-1])
    assert store.jobs.load(job.job_id).num_rows == 2800


def test_a_source_that_is_damaged_meanwhile_fails_the_job(store: Store, data: Path, large: list[str]) -> None:
    job = submit(store, data)
    indexes = plan(store, job, data)
    (data / "b.parquet").write_bytes(b"PAR1")
    for index in indexes:
        plan_one_piece(store, job.job_id, index)
    failed = store.jobs.load(job.job_id)
    assert failed.state is JobState.FAILED and "b.parquet" in (failed.message or "")


def test_an_outage_leaves_the_job_to_be_planned_again(
    store: Store, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise SourceUnavailable("can't reach s3://bucket now")

    job = submit(store, data)
    with monkeypatch.context() as patch:
        patch.setattr("gristmill.jobs.plan.order.load_columns", fail)
        with pytest.raises(SourceUnavailable):
            plan(store, job, data)
    assert store.plans.waiting() == [job.job_id]
    plan(store, job, data)
    assert store.jobs.load(job.job_id).state is JobState.IN_PROGRESS


def test_an_outage_while_a_piece_is_planned_leaves_the_piece(
    store: Store, data: Path, large: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise SourceUnavailable("can't reach s3://bucket now")

    job = submit(store, data)
    indexes = plan(store, job, data)
    with monkeypatch.context() as patch:
        patch.setattr(planner, "plan_piece", fail)
        with pytest.raises(SourceUnavailable):
            plan_one_piece(store, job.job_id, 0)
    assert store.pieces.unplanned(job.job_id) == indexes
    assert [plan_one_piece(store, job.job_id, index) for index in indexes][-1]


def test_a_job_that_is_cancelled_while_it_is_planned_never_starts(
    store: Store, data: Path, large: list[str]
) -> None:
    job = submit(store, data)
    indexes = plan(store, job, data)
    store.ends.request_cancel(job.job_id)
    assert not any(plan_one_piece(store, job.job_id, index) for index in indexes)
    assert store.jobs.load(job.job_id).state is not JobState.IN_PROGRESS


def test_identity_tells_models_and_dtypes_apart(store: Store, data: Path) -> None:
    orders = [{}, {"model": "other"}, {"dtype": "float32"}, {"seed": 1}, {"shard_rows": 7}]
    found = [plan_new(store, data, f"out{i}", **order).identity for i, order in enumerate(orders)]
    assert len(set(found)) == 4 and found[0] == found[4]


@pytest.mark.parametrize("rate", [5.0, 100.0, 1000.0])
def test_shards_have_the_learned_size_and_are_enough_for_several_workers(
    store: Store, data: Path, monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    (data / "a.jsonl").write_bytes(b'{"prompt": "one", "n": 1}\n' * 4000)
    store.workers.register("w", OWNER, [WorkerModel("null", "f" * 32, "auto", True)], "1")
    monkeypatch.setattr(
        Jobs, "learned_rows_per_s", lambda self, fingerprint, _: rate if fingerprint == "f" * 32 else None
    )
    plan_new(store, data)
    assert max(shard_rows(store)) == {5.0: 150, 100.0: 250, 1000.0: 1000}[rate]


def test_kept_columns_of_large_rows_make_small_shards(
    store: Store, data: Path, large: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "MAX_KEPT_BYTES", 500)
    job = submit(store, data, keep=["n"])
    for index in plan(store, job, data):
        plan_one_piece(store, job.job_id, index)
    sizes = shard_rows(store)
    assert sum(sizes) == 2800 and sizes[0] == 18


def test_a_prefix_key_is_that_of_the_text_all_prompts_begin_with() -> None:
    def key(**fields: Any) -> str | None:
        return build_prefix_key(JobSpec(**({"input": "a", "output": "b", "model": "m"} | fields)))

    system = "You are a careful clerk."
    assert key(system=system) == key(system=system, messages="chat") == key(system=system, prompt="{{ a }}")
    assert key(prompt="Sort this ticket: {{ a }}") == key(prompt="Sort this ticket: {{ b }}!", seed=3)
    assert key(prompt="Sort this ticket: {{ a }}") != key(prompt="Sort that ticket: {{ a }}")
    assert key(system=system) != key(system=system, model="n")
    assert key(system=system + "{% if a %}", prompt="x") == key(system=system + "{{ b }}", prompt="y")
    assert key() is key(prompt="{{ a }}") is key(prompt="Hi {{ a }}") is None


def test_jobs_are_planned_from_s3_to_s3(store: Store, s3_root: str) -> None:
    bucket, _ = split_s3_uri(s3_root)
    for name in ("in/a.jsonl", "in/b.jsonl", "other/c.jsonl"):
        s3_client().put_object(Bucket=bucket, Key=name, Body=b'{"prompt": "x"}\n' * 10)
    allow = [f"{s3_root}/in", f"{s3_root}/out"]
    spec = {"input": [f"{s3_root}/in/*.jsonl"], "output": f"{s3_root}/out/", "model": "null"}
    job = store.submissions.submit(JobSpec(**spec)).job
    assert plan_submitted_job(store, job.job_id, OWNER, allow) == []
    planned = store.jobs.load(job.job_id)
    assert (planned.state, planned.num_rows) == (JobState.IN_PROGRESS, 20), planned.message
    other = store.submissions.submit(
        JobSpec(**spec | {"input": [f"{s3_root}/*/*.jsonl"], "output": f"{s3_root}/out/2"})
    ).job
    plan_submitted_job(store, other.job_id, OWNER, allow)
    assert "is not below" in (store.jobs.load(other.job_id).message or "")
