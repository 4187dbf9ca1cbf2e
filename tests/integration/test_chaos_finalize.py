"""Figure 15: a job is finalized by five processes at once, which die at every point of it, and gets one manifest."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from hashlib import sha256

import pytest

from tests.integration.chaos import SHORT
from tests.integration.clean_run import assert_as_clean
from tests.integration.cluster import Cluster
from tests.integration.row_check import RowId, read_files
from tests.integration.worker_process import ROOT

NUM_AT_ONCE = 5
POINTS = ("finalize.claimed", "finalize.checked", "manifest.before", "manifest.after")
FINALIZER = """
import sys, time
from gristmill.jobs.output.finalize import finalize_job
from gristmill.jobs.owner import current_owner
from gristmill.jobs.storage.folder import open_storage
from gristmill.jobs.store.store import open_store

url, lease_s, job_id = sys.argv[1:]
with open_store(url, lease_s=float(lease_s)) as store:
    output = store.jobs.load(job_id).output
    while finalize_job(store, open_storage(output), job_id, current_owner()) != "completed":
        time.sleep(0.05)
"""


def start_finalizer(cluster: Cluster, job_id: str, crash_at: str | None) -> subprocess.Popen[bytes]:
    """A process that ends the job; it goes on asking while another one has the claim."""
    environment = {
        "PATH": "",
        **cluster.environment,
        **({"GRISTMILL_CRASH_AT": crash_at} if crash_at else {}),
    }
    arguments = (cluster.database_url, environment["GRISTMILL_LEASE_S"], job_id)
    return subprocess.Popen(
        [sys.executable, "-c", FINALIZER, *arguments], cwd=ROOT, env=environment, stderr=subprocess.PIPE
    )


def finalize_at_once(cluster: Cluster, job_id: str, crash_points: list[str | None]) -> list[int]:
    """Their exit codes, in order."""
    processes = [start_finalizer(cluster, job_id, point) for point in crash_points]
    errors = [process.communicate(timeout=60)[1].decode() for process in processes]
    assert not any(errors), errors
    return [process.returncode for process in processes]


def commit_all(cluster: Cluster, num_rows: int, shard_rows: int) -> tuple[str, list[RowId]]:
    """A job whose rows are all committed; its worker died before it gave the last part its name."""
    expected = cluster.write_rows("in.jsonl", num_rows)
    worker = cluster.start_worker(crash_at=f"publish.before:{num_rows // shard_rows}")
    job_id = cluster.submit("in.jsonl", "out", shard_rows=shard_rows)
    assert worker.wait(90.0) == 137, worker.log_text()[-2000:]
    assert {shard["state"] for shard in cluster.shards(job_id)} == {"done"}
    assert [shard for shard in cluster.shards(job_id) if shard["published_at"] is None]
    return job_id, expected


def load_manifest(cluster: Cluster, job_id: str) -> set[bytes]:
    """Its bytes, where there is one."""
    files = read_files(str(cluster.job(job_id)["output"]), cluster.s3)
    return {files["_manifest.json"]} & set(files.values()) if "_manifest.json" in files else set()


def assert_one_manifest(cluster: Cluster, job_id: str, expected: list[RowId], seen: set[bytes]) -> None:
    """The one that was seen from the first on; it names the parts that are there, with their hashes."""
    assert_as_clean(cluster, job_id, expected)
    [manifest] = seen | load_manifest(cluster, job_id)
    files = read_files(str(cluster.job(job_id)["output"]), cluster.s3)
    parts = {name: sha256(content).hexdigest() for name, content in files.items() if name.startswith("part-")}
    assert {part["path"]: part["sha256"] for part in json.loads(manifest)["parts"]} == parts
    kinds = [
        event["kind"] for event in cluster.query("SELECT kind FROM events WHERE job_id = :id", id=job_id)
    ]
    assert kinds.count("completed") == 1


@SHORT
def test_five_finalizers_of_which_four_die_write_one_manifest(cluster: Cluster) -> None:
    job_id, expected = commit_all(cluster, num_rows=300, shard_rows=30)
    assert finalize_at_once(cluster, job_id, [*POINTS, None]).count(137) <= len(POINTS)
    assert_one_manifest(cluster, job_id, expected, set())


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "cluster", [("postgres", "s3"), ("postgres", "local"), ("sqlite", "local")], indirect=True, ids="-".join
)
def test_finalizers_killed_fifty_times_write_one_manifest(cluster: Cluster) -> None:
    job_id, expected = commit_all(cluster, num_rows=5000, shard_rows=250)
    chance = random.Random(15)
    points = itertools.cycle(POINTS)
    seen: set[bytes] = set()
    for _ in range(9):
        at_once = [next(points) for _ in range(NUM_AT_ONCE)]
        chance.shuffle(at_once)
        assert finalize_at_once(cluster, job_id, [*at_once]) == [137] * NUM_AT_ONCE
        assert cluster.job(job_id)["state"] == "finalizing"
        seen |= load_manifest(cluster, job_id)
    workers = [cluster.start_worker(crash_at=next(points), is_awaited=False) for _ in range(NUM_AT_ONCE)]
    assert [worker.wait(60.0) for worker in workers] == [137] * NUM_AT_ONCE
    seen |= load_manifest(cluster, job_id)
    codes = finalize_at_once(cluster, job_id, ["complete.after", None, None, None, None])
    assert codes[1:] == [0] * 4 and codes[0] in (0, 137)
    assert_one_manifest(cluster, job_id, expected, seen)
    print(f"figure 15: 50 deaths of finalizers, 5 at once: {len(seen)} manifest, of the same bytes")
