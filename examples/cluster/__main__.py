"""A whole cluster on this machine: Redis, PostgreSQL, S3, two workers, and the example tickets through them.

`make cluster` runs it. It submits as anyone would, follows the job with SQL alone, and reads the completions from S3.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from psycopg.rows import dict_row

from examples.cluster.child_process import start_child
from examples.cluster.server_process import MissingServerError
from examples.cluster.servers import PostgresServer, RedisServer, S3Server, running
from gristmill.jobs.client import results

ROOT = Path(__file__).resolve().parents[2]
GRISTMILL = (sys.executable, "-m", "gristmill")
BUCKET, PLACE = "gristmill", "s3://gristmill/tickets"
TERMINAL = ("completed", "failed", "cancelled", "expired")
COLUMNS = ("custom_id", "subject", "body", "language", "priority")
SYSTEM = (
    "You work at the help desk of a software company. Sum up the customer's message in one plain English "
    "sentence of at most twenty words. Keep product names, error codes and numbers as they are written."
)
PROGRESS = """
    SELECT state, rows, rows_done, failed, shards_running, shards_done, tokens_per_s, eta_s
    FROM job_progress WHERE job_id = %(job_id)s
"""
POLL_S = 2.0
MAX_BODY = 800  # characters: so that a laptop has the answers within a minute or two


@dataclass(frozen=True, slots=True)
class Worker:
    """A started `gristmill worker`, and where it logs."""

    process: subprocess.Popen[bytes]
    log: Path


def main() -> int:
    """Starts everything, runs the job, shows the rows, stops everything; 0 when the job is completed."""
    options = parse_options()
    os.chdir(ROOT)
    with ExitStack() as stack:
        try:
            s3 = start_services(stack)
        except MissingServerError as error:
            print(f"cluster: {error}", file=sys.stderr)
            return 1
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = start_workers(stack, folder, options.workers, options.model)
        num_rows = write_tickets(s3, options.rows)
        print(f"{PLACE}/in/tickets.parquet: {num_rows} rows\n")
        job_id = submit(options.max_tokens, options.shard_rows)
        state = follow(workers, job_id, options.timeout_s)
        if state != "completed":
            logs = "\n".join(worker.log.read_text(errors="replace")[-1500:] for worker in workers)
            print(f"job {job_id} is {state}\n{logs}", file=sys.stderr)
            return 1
        show_results(job_id)
        return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", default="models/smollm2-135m-instruct.gguf", help="path of the model")
    parser.add_argument("--rows", type=int, default=40, help="rows of the example tickets")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--shard-rows", type=int, default=10)
    parser.add_argument("--timeout-s", type=float, default=900.0, help="give up then")
    return parser.parse_args()


def start_services(stack: ExitStack) -> S3Server:
    """The three servers, a database with its tables and a bucket; the environment leads to them."""
    redis = stack.enter_context(running(RedisServer))
    postgres = stack.enter_context(running(PostgresServer))
    s3 = stack.enter_context(running(S3Server))
    postgres.execute("CREATE DATABASE gristmill")
    with s3.client() as client:
        client.create_bucket(Bucket=BUCKET)
    os.environ.update(s3.environment())
    os.environ["GRISTMILL_DATABASE_URL"] = postgres.url("gristmill")
    os.environ["GRISTMILL_BROKER_URL"] = redis.url()
    for name in ("GRISTMILL_DATABASE_URL", "GRISTMILL_BROKER_URL", "AWS_ENDPOINT_URL"):
        print(f"{name}={os.environ[name]}")
    subprocess.run([*GRISTMILL, "migrate"], check=True, stdout=subprocess.DEVNULL)
    return s3


def start_workers(stack: ExitStack, folder: Path, count: int, model: str) -> list[Worker]:
    """Workers of one torch thread each, that are up: they share the cores of one machine."""
    command = [*GRISTMILL, "worker", "--model", f"summariser={model}", "--allow-uri", PLACE]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = []
    for number in range(count):
        log = folder / f"worker-{number}.log"
        workers.append(Worker(start_child(command, log, death_signal=signal.SIGKILL, env=env), log))
        stack.callback(workers[-1].process.kill)
    for worker in workers:
        while "the worker is up" not in (log_text := worker.log.read_text(errors="replace")):
            if worker.process.poll() is not None:
                raise RuntimeError(f"a worker ended with {worker.process.poll()}: {log_text[-2000:]}")
            time.sleep(0.1)
        print(f"worker {worker.process.pid} is up")
    return workers


def write_tickets(s3: S3Server, limit: int) -> int:
    """The example tickets, but for the broken lines, as Parquet in S3; how many rows."""
    rows: list[dict[str, Any]] = []
    for line in (ROOT / "examples" / "tickets.jsonl").read_bytes().splitlines():
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("body"), str) and len(row["body"]) < MAX_BODY:
                rows.append({name: None if row.get(name) is None else str(row[name]) for name in COLUMNS})
    table = pa.Table.from_pylist(rows[:limit], schema=pa.schema([(name, pa.string()) for name in COLUMNS]))
    content = io.BytesIO()
    pq.write_table(table, content)
    with s3.client() as client:
        client.put_object(Bucket=BUCKET, Key="tickets/in/tickets.parquet", Body=content.getvalue())
    return int(table.num_rows)


def submit(max_tokens: int, shard_rows: int) -> str:
    """Hands the job in with the command; its id."""
    words = ["submit", f"{PLACE}/in/", "--output", f"{PLACE}/out", "--model", "summariser"]
    words += ["--prompt", "{{ body }}", "--keep", "subject,language,priority", "--stop", "\n"]
    words += ["--max-tokens", str(max_tokens), "--shard-rows", str(shard_rows)]
    print(
        f"$ gristmill {' '.join(json.dumps(word) if '{' in word or word == chr(10) else word for word in words)}"
    )
    command = [*GRISTMILL, *words, "--system", SYSTEM]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.split()[-1]


def follow(workers: list[Worker], job_id: str, timeout_s: float) -> str:
    """Prints the job's row of the view job_progress until the job is over; its state."""
    print(f"{job_id}\n\nSQL> {' '.join(PROGRESS.split())}")
    deadline = time.monotonic() + timeout_s
    while True:
        with psycopg.connect(os.environ["GRISTMILL_DATABASE_URL"], row_factory=dict_row) as connection:
            row = connection.execute(PROGRESS, {"job_id": job_id}).fetchone()
        assert row is not None
        speed = f"{row['tokens_per_s']:,.0f} tokens/s" if row["tokens_per_s"] else ""
        eta = f"{row['eta_s']:.0f} s left" if row["eta_s"] else ""
        print(
            f"  {row['state']:<12} {row['rows_done']:>4} of {row['rows']} rows, {row['failed']} failed,"
            f" {row['shards_running']} shards running, {row['shards_done']} done  {speed}  {eta}".rstrip(),
            flush=True,
        )
        if row["state"] in TERMINAL:
            return str(row["state"])
        if time.monotonic() > deadline or all(worker.process.poll() is not None for worker in workers):
            return f"{row['state']} when time was up or no worker was left"
        time.sleep(POLL_S)


def show_results(job_id: str, num_rows: int = 8) -> None:
    """The first completions, read from S3."""
    table = results(job_id).to_table()
    print(f"\n{PLACE}/out: {table.num_rows} rows\n")
    for row in table.slice(0, num_rows).to_pylist():
        given = (
            row["completion"]
            if row["error_code"] is None
            else f"[{row['error_code']}] {row['error_message']}"
        )
        text = textwrap.shorten(" ".join(given.split()), 100, placeholder=" ...")
        print(f"{row['row_index']:>4}  {row['custom_id'] or '-':<9} {text}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
