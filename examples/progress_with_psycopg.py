"""Prints how far a job is. Needs only psycopg and the right to read the view job_progress."""

import os

import psycopg

query = "SELECT job_id, state, rows_done, rows, failed, eta_s FROM job_progress WHERE idempotency_key = %s"
with psycopg.connect(os.environ["GRISTMILL_DATABASE_URL"]) as database:
    for row in database.execute(query, ("tickets-1",)):
        print(*row)
