"""on_complete with a stranger's Celery worker: told of the job's end until it says that it has heard."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from examples.cluster.child_process import start_child
from tests.integration.chaos import SHORT
from tests.integration.cluster import Cluster
from tests.integration.worker_process import wait_until

CONSUMER = """
import json, os
from celery import Celery

app = Celery(broker=os.environ["GRISTMILL_BROKER_URL"])
app.conf.task_ignore_result = True

@app.task(name="mine.done")
def done(job):
    with open("heard.jsonl", "a") as file:
        file.write(json.dumps(job) + "\\n")
    app.send_task("gristmill.acknowledge", args=[job["job_id"]], queue="gristmill")
"""


@SHORT
def test_a_strangers_task_hears_of_the_end_until_it_acknowledges(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "stranger.py").write_text(CONSUMER)
    words = [sys.executable, *"-m celery -A stranger worker -P solo -Q gristmill.callbacks".split()]
    env = {**os.environ, **cluster.environment, "PYTHONPATH": str(tmp_path)}
    consumer = start_child(
        words, tmp_path / "consumer.log", death_signal=signal.SIGKILL, cwd=tmp_path, env=env
    )
    try:
        cluster.write_rows("in.jsonl", 20)
        cluster.start_worker()
        job_id = cluster.submit("in.jsonl", "out", key="night-1", on_complete="mine.done")
        cluster.wait_done(job_id)
        quiet = "SELECT id FROM jobs WHERE id = :id AND notices_sent > 0 AND notice_due_at IS NULL"
        cluster.wait_for(quiet, 30.0, id=job_id)
        heard = tmp_path / "heard.jsonl"
        wait_until(heard.exists, 10.0, "the task was called", (tmp_path / "consumer.log").read_text)
    finally:
        consumer.kill()
        consumer.wait()
    job = json.loads(heard.read_text().splitlines()[0])
    assert (job["job_id"], job["state"], job["completed"]) == (job_id, "completed", 20)
    assert job["idempotency_key"] == "night-1"
