"""A job a day from Airflow 3: sent until the database knows it, then waited for. A retry finds the same job again."""

import os
import time

import psycopg
from airflow.sdk import dag, task
from celery import Celery

order = {"model": "smollm2", "prompt": "Classify this ticket: {{ body }}", "max_tokens": 8}
query = "SELECT state, message FROM job_progress WHERE idempotency_key = %s"


@task(retries=3)
def grind(day: str) -> None:
    fields = {"input": [f"s3://tickets/{day}/"], "output": f"s3://tickets/{day}-out", "idempotency_key": day}
    celery = Celery(broker=os.environ["GRISTMILL_BROKER_URL"])
    state = message = None
    with psycopg.connect(os.environ["GRISTMILL_DATABASE_URL"], autocommit=True) as database:
        while state not in ("completed", "failed", "cancelled", "expired"):
            if state is None:
                celery.send_task("gristmill.submit", kwargs=order | fields, queue="gristmill")
            time.sleep(15)
            state, message = database.execute(query, (day,)).fetchone() or (None, None)
    if state != "completed":
        raise RuntimeError(f"the job of {day} is {state}: {message}")


@dag(schedule="@daily", catchup=False)
def tickets() -> None:
    grind("{{ ds }}")


tickets()
