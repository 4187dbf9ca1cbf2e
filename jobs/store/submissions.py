"""Orders that become jobs: of the queue, once per idempotency key, or of the process that gives them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.moments import parse_moment
from gristmill.jobs.owner import Owner
from gristmill.jobs.records import PRIORITIES, JobRecord, Submitted
from gristmill.jobs.states import JobState, Runner
from gristmill.jobs.store.database import Database
from gristmill.jobs.store.folder_rows import replace_jobs
from gristmill.jobs.store.job_rows import (
    add_event,
    build_job_id,
    clean_text,
    load_job,
    lock_output,
    normal_output,
    plan_values,
)
from gristmill.jobs.store.models import jobs

if TYPE_CHECKING:
    from gristmill.jobs.spec import JobSpec

MAX_KEY_SIZE = 255
_TASK = re.compile(r"[\w.:-]+(@[\w.:-]+)?")  # as JobSpec.on_complete


class Submissions:
    """Orders that become jobs, to be planned."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def submit(self, spec: JobSpec, key: str | None = None) -> Submitted:
        """A job for the queue, to be planned; the one there is already when `key` was seen before.

        Times in the spec count from the database's clock. RefusedError for a key or a name that no database
        can hold.
        """
        for name, text in {"idempotency_key": key, "output": spec.output, "model": spec.model}.items():
            if text is not None and clean_text(text) != text:
                raise RefusedError(f"{name} is {text!r}: it holds a character that is no text; remove it")
        if key is not None and not 0 < len(key) <= MAX_KEY_SIZE:
            raise RefusedError(f"the idempotency key has {len(key)} characters: give 1 to {MAX_KEY_SIZE}")
        for name, text in {"quantization": spec.quantization, "kv_dtype": spec.kv_dtype}.items():
            if text != "auto":
                option = f"--{name.replace('_', '-')}"
                raise RefusedError(
                    f"{name} is {text!r}, which is a worker's choice: start workers with {option} {text}"
                )
        with self._database.write() as (connection, now):
            values = {
                **_order_values(spec),
                "priority": PRIORITIES.index(spec.priority),
                "not_before": parse_moment(spec.not_before, now) if spec.not_before else None,
                "deadline_at": parse_moment(spec.deadline, now) if spec.deadline else None,
                "on_complete": spec.on_complete,
            }
            return _insert_job(connection, values, key, now)

    def submit_own(self, spec: JobSpec, owner: Owner, fingerprint: str, identity: str) -> JobRecord:
        """A job of the process `owner` alone, which holds it from the start.

        It takes its output folder over: an unfinished earlier job of it is cancelled. Raises JobIsLive when a live
        process holds that job.
        """
        values = _order_values(spec)
        with self._database.write() as (connection, now):
            lock_output(connection, values["output"])
            values |= {
                "runner": Runner.LOCAL,
                "fingerprint": fingerprint,
                "identity": identity,
                "owner": owner.to_text(),
                "owner_seen_at": now,
                "lease_s": self._database.lease_s,
            }
            job = _insert_job(connection, values, None, now).job
            replace_jobs(connection, job.output, job.job_id, owner, now, self._database.lease_s)
            return job

    def submit_refused(self, fields: Mapping[str, Any], key: str | None, message: str) -> JobRecord:
        """A failed job that says why an order from the queue can't be read; one per key, as for good ones."""
        texts = (fields.get(name) for name in ("output", "model", "on_complete"))
        output, model, task = (clean_text(text) if isinstance(text, str) else "" for text in texts)
        is_task = _TASK.fullmatch(task) is not None and len(task) <= MAX_KEY_SIZE
        with self._database.write() as (connection, now):
            values = {
                "state": JobState.FAILED,
                "message": clean_text(message),
                "output": normal_output(output) if output else "",
                "model": model,
                "spec": _as_json(fields),
                "on_complete": task if is_task else None,
                "finished_at": now,
                "notice_due_at": now if is_task else None,
            }
            return _insert_job(connection, values, clean_text(key)[:MAX_KEY_SIZE] if key else None, now).job


def _order_values(spec: JobSpec) -> dict[str, Any]:
    return {
        "state": JobState.VALIDATING,
        "output": normal_output(spec.output),
        "model": spec.model,
        "spec": spec.model_dump(mode="json"),
        "max_tokens": spec.max_tokens,
        "dtype": spec.dtype,
    }


def _insert_job(connection: Connection, values: dict[str, Any], key: str | None, now: float) -> Submitted:
    """The new job, or that of the key: on PostgreSQL the INSERT waits for another one of the same key."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    job_id = build_job_id(now)
    common = {
        "id": job_id,
        "runner": Runner.WORKERS,
        "idempotency_key": key,
        "created_at": now,
        "num_rows": 0,
        "num_shards": 0,
        "fingerprint": "",
        **plan_values([], [], b"", ""),
    }
    statement = insert(jobs).values(common | values)
    added = statement.on_conflict_do_nothing(index_elements=[jobs.c.idempotency_key])
    if connection.scalar(added.returning(jobs.c.id)) is None:
        job_id = connection.scalar(select(jobs.c.id).where(jobs.c.idempotency_key == key)) or ""
        return Submitted(load_job(connection, job_id), False)
    add_event(connection, job_id, now, "submitted")
    return Submitted(load_job(connection, job_id), True)


def _as_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as far as JSON can hold them; the rest as text."""
    text = json.dumps(dict(fields), default=str)
    return dict(json.loads(text, parse_constant=str))
