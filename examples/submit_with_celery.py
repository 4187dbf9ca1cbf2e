"""Submits a job. Needs only celery and the broker's address, not Gristmill."""

import os

from celery import Celery

order = {"input": ["s3://tickets/in/"], "output": "s3://tickets/out", "model": "smollm2", "max_tokens": 8}
order |= {"prompt": "Classify this ticket: {{ body }}", "idempotency_key": "tickets-1"}
app = Celery(broker=os.environ["GRISTMILL_BROKER_URL"])
app.send_task("gristmill.submit", kwargs=order, queue="gristmill")
