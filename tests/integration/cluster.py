"""A cluster for the integration and chaos tests: workers over a database, a broker and a place for files.

It reads the database with SQL of its own and the output as any reader would (tests/integration/row_check.py), so it
holds the product to what it left behind, not to what it says of itself.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from celery import Celery
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from examples.cluster.servers import S3Server
from gristmill.jobs import client
from tests.integration.row_check import RowId, RowReport, check_rows, pending_uploads, read_files
from tests.integration.worker_process import COMMAND, PATIENCE_S, ROOT, WorkerProcess, wait_until

NULL_MODELS = {"null": "null:"}
TERMINAL = ("completed", "failed", "cancelled", "expired")


class Cluster:
    """Where everything is, and the workers that were started. `close` ends these, not the servers.

    `root` is the folder or `s3://BUCKET` below which jobs read and write. `s3` is the server behind it, and
    `s3_endpoint` another way to it for the workers (a proxy). `reader_url` is the database's URL for our own queries
    where `database_url` leads through a proxy.
    """

    def __init__(
        self,
        folder: Path,
        *,
        database_url: str,
        broker_url: str,
        root: str,
        s3: S3Server | None = None,
        s3_endpoint: str | None = None,
        reader_url: str | None = None,
        lease_s: float = 3.0,
    ) -> None:
        self.folder = folder
        self.database_url = database_url
        self.broker_url = broker_url
        self.root = root.rstrip("/")
        self.s3 = s3
        self.workers: list[WorkerProcess] = []
        self.environment = {
            "GRISTMILL_DATABASE_URL": database_url,
            "GRISTMILL_BROKER_URL": broker_url,
            "GRISTMILL_LEASE_S": f"{lease_s:g}",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **(s3.environment(s3_endpoint) if s3 else {}),
        }
        self._reader = _open_reader(reader_url or database_url)

    # Workers and commands

    def start_worker(
        self,
        models: Mapping[str, str] = NULL_MODELS,
        *,
        allow: Sequence[str] | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        crash_at: str | None = None,
        is_awaited: bool = True,
    ) -> WorkerProcess:
        """Starts a worker that offers `models` (name: path) and returns when it is up, unless told not to wait.

        A job's workers need the same path for a name: another null: URL is another model, and a job keeps its model.
        `crash_at` is a point of jobs/crash_points.py: `commit.after`, `commit.after:3`, `commit.after!stop`.
        """
        arguments = [part for name, path in models.items() for part in ("--model", f"{name}={path}")]
        for place in [self.root] if allow is None else allow:
            arguments += ["--allow-uri", place]
        extra = {**(env or {}), **({"GRISTMILL_CRASH_AT": crash_at} if crash_at else {})}
        log = self.folder / f"worker-{len(self.workers)}.log"
        worker = WorkerProcess([*arguments, *args], {**os.environ, **self.environment, **extra}, log)
        self.workers.append(worker)
        if is_awaited:
            worker.wait_until_up()
        return worker

    def start_workers(self, number: int, models: Mapping[str, str], **how: Any) -> list[WorkerProcess]:
        """Starts workers at once, as start_worker does one; returns when all of them serve."""
        workers = [self.start_worker(models, is_awaited=False, **how) for _ in range(number)]
        for worker in workers:
            worker.wait_until_up()
        return workers

    def running_workers(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.is_running]

    def run(self, *arguments: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """A `gristmill` command with the cluster's environment."""
        return subprocess.run(
            [*COMMAND, *arguments],
            cwd=ROOT,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self._reader.dispose()

    # Jobs

    def place(self, name: str) -> str:
        """A path or URL below the root."""
        return f"{self.root}/{name}"

    def write(self, name: str, content: bytes) -> str:
        """Puts a file below the root; its path or URL."""
        place = self.place(name)
        if self.s3 is None:
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            Path(place).write_bytes(content)
        else:
            bucket, _, key = place.removeprefix("s3://").partition("/")
            with self.s3.client() as s3:
                s3.put_object(Bucket=bucket, Key=key, Body=content)
        return place

    def write_rows(self, name: str, num_rows: int, prefix: str = "row") -> list[RowId]:
        """A JSONL input of rows {custom_id, text}; the ids that its output must have."""
        rows = ({"custom_id": f"{prefix}-{i}", "text": f"{prefix} number {i}"} for i in range(num_rows))
        place = self.write(name, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        return [(place, i) for i in range(num_rows)]

    def submit(self, inputs: str | list[str], output: str, *, key: str | None = None, **fields: Any) -> str:
        """Submits through the Python API; names are below the root. Fields default to a quick job on `null`."""
        return client.submit(
            **self.order(inputs, output, **fields),
            idempotency_key=key,
            database_url=self.database_url,
            broker_url=self.broker_url,
        )

    def order(self, inputs: str | list[str], output: str, **fields: Any) -> dict[str, Any]:
        names = [inputs] if isinstance(inputs, str) else inputs
        defaults = {"model": "null", "prompt": "{{ text }}", "max_tokens": 8}
        places = {"input": [self.place(name) for name in names], "output": self.place(output)}
        return {**defaults, **places, **fields}

    def send(self, task: str, *args: Any, queue: str = "gristmill", priority: int = 3, **kwargs: Any) -> str:
        """Sends a message as a stranger's Celery would, knowing nothing of Gristmill; the task's id."""
        with closing(Celery(broker=self.broker_url, set_as_current=False)) as app:
            sent = app.send_task(
                task, args=args, kwargs=kwargs, queue=queue, priority=priority, ignore_result=True
            )
            return str(sent.id)

    def send_submission(self, key: str, inputs: str | list[str], output: str, **fields: Any) -> None:
        """The `gristmill.submit` message."""
        self.send("gristmill.submit", **self.order(inputs, output, **fields), idempotency_key=key)

    # What is so

    def query(self, sql: str, **values: Any) -> list[dict[str, Any]]:
        """Rows of the database, past any proxy that `reader_url` avoids."""
        with self._reader.connect() as connection:
            return [dict(row) for row in connection.execute(text(sql), values).mappings()]

    def job(self, job_id: str) -> dict[str, Any]:
        [row] = self.query("SELECT * FROM jobs WHERE id = :id", id=job_id)
        return row

    def shards(self, job_id: str) -> list[dict[str, Any]]:
        return self.query("SELECT * FROM shards WHERE job_id = :id ORDER BY shard_index", id=job_id)

    def attempts(self, job_id: str) -> list[dict[str, Any]]:
        return self.query(
            "SELECT attempts.*, shards.shard_index FROM attempts JOIN shards ON shards.id = attempts.shard_id "
            "WHERE shards.job_id = :id ORDER BY shards.shard_index, attempts.fence",
            id=job_id,
        )

    def progress(self, job_id: str) -> dict[str, Any]:
        """The job's row of the view job_progress."""
        [row] = self.query("SELECT * FROM job_progress WHERE job_id = :id", id=job_id)
        return row

    def wait_for(self, sql: str, timeout_s: float = PATIENCE_S, **values: Any) -> list[dict[str, Any]]:
        """The rows of a query as soon as it has any; a database that is down or not yet there is waited for.

        It does not wait for workers that have all ended.
        """
        found: list[dict[str, Any]] = []

        def look() -> bool:
            is_hopeless = bool(self.workers) and not self.running_workers()
            try:
                found[:] = self.query(sql, **values)
            except DBAPIError:
                return False
            assert found or not is_hopeless, f"no worker is left: {sql} {values}\n{self.describe()}"
            return bool(found)

        wait_until(look, timeout_s, f"{sql} {values}", self.describe)
        return found

    def wait_job(self, key: str, timeout_s: float = PATIENCE_S) -> str:
        """The id of the job that was submitted with this key."""
        sql = "SELECT id FROM jobs WHERE idempotency_key = :key"
        return str(self.wait_for(sql, timeout_s, key=key)[0]["id"])

    def wait_started(self, job_id: str, timeout_s: float = PATIENCE_S) -> None:
        """Returns when a shard of the job is running."""
        self.wait_for("SELECT id FROM shards WHERE job_id = :id AND state = 'running'", timeout_s, id=job_id)

    def wait_rows(self, job_id: str, num_rows: int, timeout_s: float = PATIENCE_S) -> None:
        """Returns when so many rows are committed."""
        sql = "SELECT sum(part_rows) FROM shards WHERE job_id = :id HAVING sum(part_rows) >= :rows"
        self.wait_for(sql, timeout_s, id=job_id, rows=num_rows)

    def wait_done(
        self, job_id: str, timeout_s: float = PATIENCE_S, state: str = "completed"
    ) -> dict[str, Any]:
        """The job's row once it is over; AssertionError unless it ended in `state`."""
        states = ", ".join(f"'{name}'" for name in TERMINAL)
        [row] = self.wait_for(
            f"SELECT * FROM jobs WHERE id = :id AND state IN ({states})", timeout_s, id=job_id
        )
        assert row["state"] == state, f"{row['state']}: {row['message']}\n{self.logs()}"
        return row

    def describe(self) -> str:
        """The jobs and their shards by state, and the ends of the logs: what to look at when a wait fails."""
        try:
            jobs = self.query("SELECT id, state, message, stopping_as, finalize_owner FROM jobs")
            shards = self.query(
                "SELECT job_id, state, owner, lease_until, message, count(*) AS shards FROM shards "
                "GROUP BY job_id, state, owner, lease_until, message"
            )
        except DBAPIError as error:
            jobs, shards = [], [{"error": str(error.orig)}]
        return "\n".join([*map(str, jobs + shards), self.logs()])

    def logs(self, num_bytes: int = 1500) -> str:
        """The ends of the workers' logs, for a message."""
        return "\n".join(f"-- {worker.log.name}\n{worker.log_text()[-num_bytes:]}" for worker in self.workers)

    def check(self, job_id: str, expected: Sequence[RowId]) -> RowReport:
        """Lost, doubled and unknown rows in the job's output."""
        return check_rows(str(self.job(job_id)["output"]), expected, self.s3)

    def assert_whole(self, job_id: str, expected: Sequence[RowId]) -> None:
        """The job ends completed: every row once, one commit a shard, a manifest that agrees, nothing left over."""
        job = self.wait_done(job_id)
        report = self.check(job_id, expected)
        assert report.is_whole, str(report)
        assert {shard["state"] for shard in self.shards(job_id)} == {"done"}
        files = read_files(str(job["output"]), self.s3)
        assert not [name for name in files if not name.startswith(("part-", "_manifest.json"))], list(files)
        totals = json.loads(files["_manifest.json"])["totals"]
        assert totals["rows"] == len(expected)
        if self.s3 is not None:
            assert not pending_uploads(str(job["output"]), self.s3)


def _open_reader(database_url: str) -> Engine:
    """Connections that are opened for each query: they survive whatever the test does to the database."""
    url = make_url(database_url)
    if url.get_backend_name() == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    return create_engine(url, poolclass=NullPool)
