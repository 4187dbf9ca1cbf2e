"""A million rows from Parquet in S3 to Parquet in S3, with Redis and PostgreSQL: what grows, what planning costs."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from gristmill.jobs.client import results
from tests.integration.chaos import LONG
from tests.integration.cluster import TERMINAL, Cluster
from tests.integration.worker_process import WorkerProcess

MIB = 1 << 20
NUM_ROWS, LIMIT_S = 1_000_000, 900.0


@dataclass
class Samples:
    """What one worker held at each look."""

    parent_bytes: list[int] = field(default_factory=list)
    engine_bytes: list[int] = field(default_factory=list)
    num_files: list[int] = field(default_factory=list)
    num_keys: list[int] = field(default_factory=list)

    def look(self, worker: WorkerProcess, broker: redis.Redis) -> None:
        process = psutil.Process(worker.pid)
        self.parent_bytes.append(process.memory_info().rss)
        self.engine_bytes.append(sum(engine.memory_info().rss for engine in worker.engines()))
        self.num_files.append(process.num_fds())
        self.num_keys.append(broker.dbsize())


def write_parquet(cluster: Cluster, num_rows: int) -> None:
    """Rows of about 200 bytes, in groups of 50,000."""
    path: Path = cluster.folder / "rows.parquet"
    schema = pa.schema([("custom_id", pa.string()), ("text", pa.string())])
    filler = (
        "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore "
    )
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, 50_000):
            ids = range(start, min(start + 50_000, num_rows))
            texts = [f"{i}: {filler}{i * 7919 % 1_000_003}" for i in ids]
            writer.write_table(pa.table({"custom_id": [f"r{i}" for i in ids], "text": texts}, schema=schema))
    cluster.write("in/rows.parquet", path.read_bytes())


def read_row_indexes(cluster: Cluster, job_id: str) -> np.ndarray:
    """row_index of all output rows, sorted."""
    return np.sort(
        results(job_id, database_url=cluster.database_url)
        .to_table(columns=["row_index"])
        .column(0)
        .to_numpy()
    )


def assert_flat(values: list[int], slack: float, what: str) -> None:
    """The second half's median is no more than `slack` above the first third's end."""
    third = len(values) // 3
    early, late = float(np.median(values[third : 2 * third])), float(np.median(values[2 * third :]))
    assert late <= early * (1 + slack), f"{what}: {early:.0f} in the middle, {late:.0f} at the end"


@pytest.mark.long
@pytest.mark.timeout(1200)
@LONG
def test_a_million_rows_keep_memory_files_and_keys_flat(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    write_parquet(cluster, NUM_ROWS)
    worker = cluster.start_worker()
    job_id = cluster.submit("in/", "out")
    samples = Samples()
    deadline = time.monotonic() + LIMIT_S
    with closing(redis.Redis.from_url(cluster.broker_url)) as broker:
        while cluster.job(job_id)["state"] not in TERMINAL:
            if cluster.progress(job_id)["rows_done"]:
                samples.look(worker, broker)
            assert time.monotonic() < deadline, cluster.describe()
            time.sleep(0.5)
    job = cluster.wait_done(job_id)
    assert np.array_equal(read_row_indexes(cluster, job_id), np.arange(NUM_ROWS))
    [planned] = cluster.query("SELECT at FROM events WHERE job_id = :id AND kind = 'planned'", id=job_id)
    work_s = job["finished_at"] - job["started_at"]
    plan_share = (planned["at"] - job["created_at"]) / work_s
    print(
        f"{NUM_ROWS:,} rows in {work_s:.1f} s: {NUM_ROWS / work_s:,.0f} rows/s; from submission to plan"
        f" {planned['at'] - job['created_at']:.2f} s ({plan_share:.1%}); parent"
        f" {max(samples.parent_bytes) / MIB:.0f} MiB, engine {max(samples.engine_bytes) / MIB:.0f} MiB,"
        f" files {max(samples.num_files)}, Redis keys {max(samples.num_keys)}"
    )
    assert len(samples.parent_bytes) >= 30
    assert_flat(samples.parent_bytes, 0.15, "memory of the worker")
    assert_flat(samples.engine_bytes, 0.15, "memory of the engine")
    assert_flat(samples.num_files, 0.10, "open files")
    assert max(samples.parent_bytes) < 800 * MIB
    assert max(samples.num_keys) <= 20
    assert plan_share < 0.02
