"""Small jobs for the store's tests: a clock to turn, owners that live or died, results without an engine."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
from sqlalchemy import text, update

from gristmill.jobs.output import parts
from gristmill.jobs.output.parts import strip_errors, write_attempt
from gristmill.jobs.output.publishing import publish_part
from gristmill.jobs.output.schema import build_part_schema
from gristmill.jobs.owner import Owner, current_owner
from gristmill.jobs.records import JobRecord, ModelOffer, PartFile, ShardClaim, offer_for
from gristmill.jobs.results import Result
from gristmill.jobs.source import Plan, PlanPiece, ShardRange, Source
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.states import JobState
from gristmill.jobs.stats import JobStats, ShardCounts
from gristmill.jobs.storage.folder import Storage
from gristmill.jobs.store.models import jobs
from gristmill.jobs.store.store import Store

SCHEMA = build_part_schema([], {}, are_typed=False)
SOURCES = [Source("/data/tickets.jsonl", 1000, "1", "jsonl")]
ELSEWHERE = Owner("elsewhere", "boot", 7, 7)  # a process of which only its lease can be known
OTHER_PLACE = Owner("other-place", "boot", 8, 8)
ADD_WORKER = text(
    "INSERT INTO workers (id, owner, host, pid, version, models, num_shards, num_rows_in_flight, started_at, seen_at)"
    " VALUES ('w', 'o', 'h', 1, '1', '[]', 0, 0, 0, 0)"
)
OFFER = ModelOffer("null", ("auto", "float32"), "f" * 32)


@dataclass
class Clock:
    """Database time that a test turns on by hand."""

    now: float = 4_000_000_000.0  # later than the time of the views, which is the database's own

    def __call__(self) -> float:
        return self.now


def dead_owner() -> Owner:
    """A process of this host that is gone."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return replace(current_owner(), pid=child.pid)


def build_plan(*shard_rows: int) -> Plan:
    shards, first = [], 0
    for index, rows in enumerate(shard_rows):
        shards.append(ShardRange(index, 0, first, rows, rows, first * 10, rows * 10))
        first += rows
    return Plan(tuple(shards), first)


def change_job(store: Store, job: JobRecord, **values: Any) -> None:
    """Writes these columns of the job."""
    with store.database.write() as (connection, _):
        connection.execute(update(jobs).where(jobs.c.id == job.job_id).values(values))


def create_job(
    store: Store, output: Path, *shard_rows: int, owner: Owner | None = None, **spec: Any
) -> JobRecord:
    """A job of a run that is in progress, and held by `owner`; None: at rest."""
    order = JobSpec(input=["tickets.jsonl"], output=str(output), model="null:", **spec)
    job = store.submissions.submit_own(order, owner or ELSEWHERE, "f" * 32, "i" * 32)
    assert start_job(store, job, *shard_rows)
    if owner is None:
        store.jobs.release(job.job_id, ELSEWHERE)
    return store.jobs.load(job.job_id)


def submit_job(
    store: Store, output: Path | str, *shard_rows: int, prefix_key: str | None = None, **spec: Any
) -> JobRecord:
    """A job of the queue; with shard_rows it is planned and in progress."""
    key = spec.pop("key", None)
    order = JobSpec(**({"input": ["tickets.jsonl"], "output": str(output), "model": "null"} | spec))
    job = store.submissions.submit(order, key).job
    if shard_rows:
        assert start_job(store, job, *shard_rows, prefix_key=prefix_key)
    return store.jobs.load(job.job_id)


def start_job(store: Store, job: JobRecord, *shard_rows: int, prefix_key: str | None = None) -> bool:
    plan, schema = build_plan(*shard_rows), SCHEMA.serialize().to_pybytes()
    return store.plans.start(job.job_id, SOURCES, ["text"], plan, schema, "i" * 32, prefix_key)


def build_pieces(number: int) -> list[PlanPiece]:
    """Byte ranges of the one source, as plan_pieces cuts them."""
    return [PlanPiece(0, index * 10, 10) for index in range(number)]


def cancel(store: Store, job: JobRecord) -> None:
    """Stops a job of the queue that nobody runs, to its end."""
    assert store.ends.stop(job.job_id, JobState.CANCELLED)
    assert store.ends.drain_stopped() == [job.job_id]


def count_rows(store: Store, job_id: str) -> tuple[int, int, int]:
    """How many rows are completed, failed, not run."""
    status = store.jobs.status(job_id)
    return status.completed, status.failed, status.not_run


def at_once(number: int, work: Callable[[int], Any]) -> list[Any]:
    """What `number` threads return that do `work` at the same moment; the first error is raised."""
    barrier = threading.Barrier(number)

    def run(index: int) -> Any:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(number) as threads:
        return list(threads.map(run, range(number)))


def claim_next(store: Store, owner: Owner = ELSEWHERE, warm: Collection[str] = ()) -> ShardClaim:
    claim = store.claims.next(OFFER, owner, warm)
    assert claim is not None
    return claim


def run_queue(store: Store, storage: Storage) -> None:
    """Everything that OFFER can run, to the end of the last shard."""
    while claim := store.claims.next(OFFER, ELSEWHERE):
        finish_shard(store, storage, claim)


def run_job(store: Store, storage: Storage, output: Path | str, *shard_rows: int, **spec: Any) -> JobRecord:
    """A job of the queue of which every shard is done."""
    job = submit_job(store, output, *shard_rows, **spec)
    run_queue(store, storage)
    return job


def finish_shard(store: Store, storage: Storage, claim: ShardClaim, num_errors: int = -1) -> ShardClaim:
    """Strips and computes what is left of a shard; with num_errors, so many of the rows are errors."""
    if claim.strip_errors:
        part, counts, stats = strip_errors(storage, claim, SCHEMA, SOURCES, "parquet")
        assert store.shards.commit(claim, part, counts, stats, clear_strip=True)
        claim = replace(claim, part=part, strip_errors=False)
    first = claim.range.first_row
    left = sorted(set(range(first, first + claim.range.num_rows)) - load_done_rows(storage, claim.part))
    results = build_results(*left)
    if num_errors >= 0:
        results = [build_results(9 if index < num_errors else 1)[0] for index in range(len(left))]
        results = [replace(result, row_index=row) for result, row in zip(results, left, strict=True)]
    part = write_attempt(storage, claim, results, SCHEMA, SOURCES, "parquet")
    assert store.shards.commit(claim, part, *count_results(results), complete=True)
    publish_part(storage, store.shards, claim.shard_id, part)
    return replace(claim, part=part)


def load_done_rows(storage: Storage, part: PartFile | None) -> set[int]:
    """The row_index of every row in the part of a job with one source."""
    return {row_index for _, row_index in parts.load_done_rows(storage, part, SOURCES)}


def build_results(*rows: int, source_index: int = 0) -> list[Result]:
    """Completions, and for every tenth row an error."""
    return [
        Result(source_index, row, error_code="null_value", error_message="column text is null")
        if row % 10 == 9
        else Result(source_index, row, f"id-{row}", (), f"tệxt {row}", "stop", 5, 3, 2)
        for row in rows
    ]


def count_results(results: list[Result]) -> tuple[ShardCounts, JobStats]:
    stats = JobStats()
    for result in results:
        if result.error_code:
            stats.record_error(result.error_code)
        else:
            stats.record_latency(0.5, 0.25, 0.01)
    failed = sum(stats.errors_by_code.values())
    done = len(results) - failed
    return ShardCounts(done, failed, 0, 5 * done, 3 * done, 2 * done), stats


def write_rows(storage: Storage, claim: ShardClaim, *rows: int, output_format: str = "parquet") -> PartFile:
    return write_attempt(storage, claim, build_results(*rows), SCHEMA, SOURCES, output_format)


def commit_rows(
    store: Store,
    storage: Storage,
    claim: ShardClaim,
    *rows: int,
    publish: bool = True,
    output_format: str = "parquet",
    **how: bool,
) -> ShardClaim | None:
    """Writes, commits and publishes rows; the claim with its new part, or None when it was lost."""
    part = write_rows(storage, claim, *rows, output_format=output_format)
    if not store.shards.commit(claim, part, *count_results(build_results(*rows)), **how):
        return None
    if publish:
        publish_part(storage, store.shards, claim.shard_id, part)
    return replace(claim, part=part)


def claim_or_fail(store: Store, job: JobRecord, owner: Owner = ELSEWHERE) -> ShardClaim:
    claim = store.claims.next(offer_for(job), owner)
    assert claim is not None
    return claim


def run_all(store: Store, storage: Storage, job: JobRecord, output_format: str = "parquet") -> None:
    while claim := store.claims.next(offer_for(job), ELSEWHERE):
        rows = range(claim.range.first_row, claim.range.first_row + claim.range.num_rows)
        commit_rows(store, storage, claim, *rows, complete=True, output_format=output_format)


def read_rows(folder: Path) -> list[int]:
    """row_index of every row that a reader of the folder sees."""
    table: pa.Table = (
        pa.dataset.dataset(folder, format="parquet").to_table() if any(folder.glob("part-*")) else None
    )
    return [] if table is None else table.column("row_index").to_pylist()
