"""Submits a job until it is there. A message may be lost; the key makes one job of it, however often it is sent."""

import os
import time

import psycopg
from celery import Celery


def submit_safely(order: dict[str, object]) -> str:
    celery = Celery(broker=os.environ["GRISTMILL_BROKER_URL"])
    query = "SELECT job_id FROM job_progress WHERE idempotency_key = %s"
    with psycopg.connect(os.environ["GRISTMILL_DATABASE_URL"], autocommit=True) as database:
        while True:
            celery.send_task("gristmill.submit", kwargs=order, queue="gristmill")
            for _ in range(15):
                if row := database.execute(query, (order["idempotency_key"],)).fetchone():
                    return str(row[0])
                time.sleep(1)
