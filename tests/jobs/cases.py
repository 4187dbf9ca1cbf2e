"""Small jobs for the store's tests: a clock to turn, owners that live or died, results without an engine."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset

from jobs.owner import Owner, current_owner
from jobs.part_schema import build_part_schema
from jobs.parts import write_attempt
from jobs.planning import Plan, ShardRange
from jobs.publishing import publish_part
from jobs.records import JobRecord, PartFile, ShardClaim
from jobs.results import Result
from jobs.sources import Source
from jobs.spec import JobSpec
from jobs.stats import JobStats, ShardCounts
from jobs.storage import LocalStorage
from jobs.store import Store

SCHEMA = build_part_schema([], {}, any_jsonl=True)
SOURCES = [Source("/data/tickets.jsonl", 1000, "1", "jsonl")]
ELSEWHERE = Owner("elsewhere", "boot", 7, 7)  # a process of which only its lease can be known
OTHER_PLACE = Owner("other-place", "boot", 8, 8)


@dataclass
class Clock:
    """Database time that a test turns on by hand."""

    now: float = 1_800_000_000.0

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


def create_job(
    store: Store, output: Path, *shard_rows: int, owner: Owner | None = None, **spec: Any
) -> JobRecord:
    order = JobSpec(input=["tickets.jsonl"], output=str(output), model="null:", **spec)
    return store.create_job(order, SOURCES, build_plan(*shard_rows), "f" * 32, "i" * 32, SCHEMA, owner)


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


def write_rows(
    storage: LocalStorage, claim: ShardClaim, *rows: int, output_format: str = "parquet"
) -> PartFile:
    return write_attempt(storage, claim, build_results(*rows), SCHEMA, SOURCES, output_format)


def commit_rows(
    store: Store,
    storage: LocalStorage,
    claim: ShardClaim,
    *rows: int,
    publish: bool = True,
    output_format: str = "parquet",
    **how: bool,
) -> ShardClaim | None:
    """Writes, commits and publishes rows; the claim with its new part, or None when it was lost."""
    part = write_rows(storage, claim, *rows, output_format=output_format)
    if not store.commit_shard(claim, part, *count_results(build_results(*rows)), **how):
        return None
    if publish:
        publish_part(storage, store, claim.shard_id, part)
    return replace(claim, part=part)


def claim_or_fail(store: Store, job: JobRecord, owner: Owner = ELSEWHERE) -> ShardClaim:
    claim = store.claim_shard(job.job_id, owner)
    assert claim is not None
    return claim


def run_all(store: Store, storage: LocalStorage, job: JobRecord, output_format: str = "parquet") -> None:
    while claim := store.claim_shard(job.job_id, ELSEWHERE):
        rows = range(claim.range.first_row, claim.range.first_row + claim.range.num_rows)
        commit_rows(store, storage, claim, *rows, complete=True, output_format=output_format)


def read_rows(folder: Path) -> list[int]:
    """row_index of every row that a reader of the folder sees."""
    table: pa.Table = (
        pa.dataset.dataset(folder, format="parquet").to_table() if any(folder.glob("part-*")) else None
    )
    return [] if table is None else table.column("row_index").to_pylist()
