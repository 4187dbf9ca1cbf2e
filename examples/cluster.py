"""A whole cluster on this machine: Redis, PostgreSQL, S3, two workers, and the example tickets through them.

`make cluster` runs it. It submits as anyone would, follows the job with SQL alone, and reads the completions from S3.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import textwrap
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.jobs.client import results
from tests.integration.cluster import TERMINAL, Cluster
from tests.server_process import MissingServerError
from tests.servers import PostgresServer, RedisServer, S3Server, running

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("custom_id", "subject", "body", "language", "priority")
SYSTEM = (
    "You work at the help handlers of a software company. Sum up the customer's message in one plain English "
    "sentence of at most twenty words. Keep product names, error codes and numbers as they are written."
)
PROGRESS = """
    SELECT state, rows, rows_done, failed, shards_running, shards_done, tokens_per_s, eta_s
    FROM job_progress WHERE job_id = :job_id
"""
POLL_S = 2.0
MAX_BODY = 800  # characters: so that a laptop has the answers within a minute or two


def main() -> int:
    """Starts everything, runs the job, shows the rows, stops everything; 0 when the job is completed."""
    options = parse_options()
    os.chdir(ROOT)
    with ExitStack() as stack:
        try:
            cluster = start_services(stack, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        except MissingServerError as error:
            print(f"cluster: {error}", file=sys.stderr)
            return 1
        os.environ.update(cluster.environment)  # for the reading of the results below
        start_workers(cluster, options.workers, options.model)
        num_rows = write_tickets(cluster, options.rows)
        print(f"s3://gristmill/tickets/in/tickets.parquet: {num_rows} rows\n")
        job_id = submit(cluster, options.max_tokens, options.shard_rows)
        state = follow(cluster, job_id, options.timeout_s)
        if state != "completed":
            print(f"job {job_id} is {state}\n{cluster.logs()}", file=sys.stderr)
            return 1
        show_results(cluster, job_id)
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


def start_services(stack: ExitStack, folder: Path) -> Cluster:
    """The three servers, an empty database and a bucket; all of it ends with the stack."""
    redis = stack.enter_context(running(RedisServer))
    postgres = stack.enter_context(running(PostgresServer))
    s3 = stack.enter_context(running(S3Server))
    postgres.execute("CREATE DATABASE gristmill")
    with s3.client() as client:
        client.create_bucket(Bucket="gristmill")
    cluster = Cluster(
        folder,
        database_url=postgres.url("gristmill"),
        broker_url=redis.url(),
        root="s3://gristmill/tickets",
        s3=s3,
        lease_s=10.0,
    )
    stack.callback(cluster.close)
    for name in ("GRISTMILL_DATABASE_URL", "GRISTMILL_BROKER_URL", "AWS_ENDPOINT_URL"):
        print(f"{name}={cluster.environment[name]}")
    migrated = cluster.run("migrate")
    assert migrated.returncode == 0, migrated.stderr
    return cluster


def start_workers(cluster: Cluster, count: int, model: str) -> None:
    """Workers of one torch thread each: they share the cores of one machine."""
    for _ in range(count):
        cluster.start_worker({"summariser": model}, is_awaited=False)
    for worker in cluster.workers:
        worker.wait_until_up()
        print(f"worker {worker.pid} is up")


def write_tickets(cluster: Cluster, limit: int) -> int:
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
    cluster.write("in/tickets.parquet", content.getvalue())
    return int(table.num_rows)


def submit(cluster: Cluster, max_tokens: int, shard_rows: int) -> str:
    """Hands the job in with the command; its id."""
    words = ["submit", cluster.place("in/"), "--output", cluster.place("out"), "--model", "summariser"]
    words += ["--prompt", "{{ body }}", "--keep", "subject,language,priority", "--stop", "\n"]
    words += ["--max-tokens", str(max_tokens), "--shard-rows", str(shard_rows)]
    print(
        f"$ gristmill {' '.join(json.dumps(word) if '{' in word or word == chr(10) else word for word in words)}"
    )
    done = cluster.run(*words, "--system", SYSTEM)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def follow(cluster: Cluster, job_id: str, timeout_s: float) -> str:
    """Prints the job's row of the view job_progress until the job is over; its state."""
    print(f"{job_id}\n\nSQL> {' '.join(PROGRESS.split())}")
    deadline = time.monotonic() + timeout_s
    while True:
        [row] = cluster.query(PROGRESS, job_id=job_id)
        speed = f"{row['tokens_per_s']:,.0f} tokens/s" if row["tokens_per_s"] else ""
        eta = f"{row['eta_s']:.0f} s left" if row["eta_s"] else ""
        print(
            f"  {row['state']:<12} {row['rows_done']:>4} of {row['rows']} rows, {row['failed']} failed,"
            f" {row['shards_running']} shards running, {row['shards_done']} done  {speed}  {eta}".rstrip(),
            flush=True,
        )
        if row["state"] in TERMINAL:
            return str(row["state"])
        if time.monotonic() > deadline or not cluster.running_workers():
            return f"{row['state']} when time was up or no worker was left"
        time.sleep(POLL_S)


def show_results(cluster: Cluster, job_id: str, num_rows: int = 8) -> None:
    """The first completions, read from S3."""
    table = results(job_id, database_url=cluster.database_url).to_table()
    print(f"\n{cluster.place('out')}: {table.num_rows} rows\n")
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
