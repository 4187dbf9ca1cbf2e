"""Gristmill from Python: submit a job to the workers, follow it, read its results.

Everything goes through the job database; the broker only wakes. A job is named by its id or its output. Without
`database_url` and `broker_url` GRISTMILL_DATABASE_URL and GRISTMILL_BROKER_URL hold. Errors: jobs/errors.py.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from gristmill.jobs.broker import (
    CONTROL_QUEUE,
    PLAN_JOB,
    RUN_SHARDS,
    Notifier,
    broker_url,
    has_broker,
    model_queue,
)
from gristmill.jobs.errors import RefusedError, StoreUnavailable
from gristmill.jobs.fields import JobFields
from gristmill.jobs.records import JobRecord, JobStatus, Submitted, WorkerRecord
from gristmill.jobs.spec import JobSpec, parse_spec
from gristmill.jobs.states import TERMINAL_JOB_STATES, JobState
from gristmill.jobs.store.database import database_url as to_database_url
from gristmill.jobs.store.store import Store, open_store

if TYPE_CHECKING:
    import pyarrow.dataset as ds

POLL_S = 1.0

logger = logging.getLogger(__name__)


def submit(
    *,
    idempotency_key: str | None = None,
    database_url: str | None = None,
    broker_url: str | None = None,
    **fields: Unpack[JobFields],
) -> str:
    """Submits a job of these fields of JobSpec and returns its id; the same key again returns the same job.

    `model` is the name that workers give to a model. The job is in the database when this returns: where the
    broker is down (a warning in the log) workers find it by themselves.
    """
    spec = parse_spec(fields)
    with open_store(to_database_url(database_url)) as store:
        return submit_spec(store, spec, idempotency_key, broker_url).job.job_id


def submit_spec(store: Store, spec: JobSpec, key: str | None, broker: str | None) -> Submitted:
    """The job first, then the notifier. A broker URL that can't be right is refused before anything is written."""
    if has_broker(broker):
        broker_url(broker)
    submitted = store.submissions.submit(to_absolute(spec), key)
    if submitted.is_new:
        notify_once(broker, PLAN_JOB, [submitted.job.job_id], CONTROL_QUEUE, spec.priority)
    return submitted


def status(job: str, *, database_url: str | None = None) -> JobStatus:
    """The job's state and figures."""
    with open_store(to_database_url(database_url)) as store:
        return store.jobs.status(find_job(store, job).job_id)


def wait(
    job: str,
    timeout_s: float | None = None,
    poll_s: float = POLL_S,
    on_progress: Callable[[JobStatus], None] | None = None,
    *,
    database_url: str | None = None,
) -> JobStatus:
    """The job's status once it is over, whatever its end; `on_progress` gets every status until then.

    A database that does not answer for a while is waited for. Raises TimeoutError after timeout_s.
    """
    with open_store(to_database_url(database_url)) as store:
        return wait_for_job(store, find_job(store, job).job_id, timeout_s, poll_s, on_progress)


def wait_for_job(
    store: Store,
    job_id: str,
    timeout_s: float | None = None,
    poll_s: float = POLL_S,
    on_progress: Callable[[JobStatus], None] | None = None,
) -> JobStatus:
    """`wait` on a store that is open."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    is_answering = True
    state = "unknown"
    while True:
        try:
            found = store.jobs.status(job_id)
        except StoreUnavailable as error:
            if is_answering:
                logger.warning("waits for the database: %s", error)
            is_answering = False
        else:
            is_answering, state = True, found.state
            if on_progress is not None:
                on_progress(found)
            if found.state in TERMINAL_JOB_STATES:
                return found
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    f"job {job_id} is {state} after {timeout_s:g} s; it goes on, wait again for its end"
                )
            time.sleep(min(poll_s, left_s))
        else:
            time.sleep(poll_s)


def cancel(job: str, *, database_url: str | None = None) -> JobState:
    """Stops the job; what is done stays. Returns the state: cancelling while workers hand back their rows."""
    with open_store(to_database_url(database_url)) as store:
        return cancel_job(store, find_job(store, job).job_id)


def cancel_job(store: Store, job_id: str) -> JobState:
    """`cancel` on a store that is open."""
    state = store.ends.request_cancel(job_id)
    if state is JobState.CANCELLING and store.ends.finish_cancel(job_id):
        return JobState.CANCELLED
    return state


def resume(job: str, *, database_url: str | None = None, broker_url: str | None = None) -> JobState:
    """Goes on with a job of the queue that failed, was cancelled or expired; no committed row runs again."""
    with open_store(to_database_url(database_url)) as store:
        job_id = find_job(store, job).job_id
        state = store.ends.resume(job_id)
        notify_workers(store, job_id, broker_url)
        return state


def retry(job: str, *, database_url: str | None = None, broker_url: str | None = None) -> int:
    """Lets the workers run the failed rows of an ended job again, and only these; how many they are."""
    with open_store(to_database_url(database_url)) as store:
        job_id = find_job(store, job).job_id
        num_rows = store.ends.retry_failed(job_id)
        notify_workers(store, job_id, broker_url)
        return num_rows


def list_jobs(limit: int = 20, *, database_url: str | None = None) -> list[JobStatus]:
    """The newest jobs, newest first."""
    with open_store(to_database_url(database_url)) as store:
        return [store.jobs.status(job.job_id) for job in store.jobs.newest(limit)]


def workers(*, database_url: str | None = None) -> list[WorkerRecord]:
    """The worker processes that this database knows: what they offer, when they were last seen."""
    with open_store(to_database_url(database_url)) as store:
        return store.workers.load_all()


def results(job: str, *, database_url: str | None = None) -> ds.Dataset:
    """The job's committed rows, completions and errors, as a pyarrow dataset over its part files."""
    from gristmill.jobs.output.dataset import load_dataset

    with open_store(to_database_url(database_url)) as store:
        return load_dataset(store.shards, find_job(store, job))


def acknowledge(job: str, *, database_url: str | None = None) -> bool:
    """Says that the end of the job was heard of: its on_complete task is not called again."""
    with open_store(to_database_url(database_url)) as store:
        return store.notices.acknowledge(find_job(store, job).job_id)


def find_job(store: Store, reference: str) -> JobRecord:
    """The job that the reference names: an id, the beginning of one, or an output. Raises RefusedError."""
    job = store.jobs.find(reference)
    if job is None:
        raise RefusedError(f"no job {reference!r} in this database: `gristmill list` shows those there are")
    return job


def notify_workers(store: Store, job_id: str, broker: str | None) -> None:
    """Wakes the workers for a job that was put back in the queue; without a broker they see it by themselves."""
    job = store.jobs.load(job_id)
    if job.state is JobState.VALIDATING:
        notify_once(broker, PLAN_JOB, [job_id], CONTROL_QUEUE, job.priority)
    elif job.model in store.workers.known_models():
        notify_once(broker, RUN_SHARDS, [job.model], model_queue(job.model), job.priority)


def notify_once(broker: str | None, task: str, args: list[Any], queue: str, priority: str = "normal") -> bool:
    """One notification from a process that sends no others; False without a broker, or when it does not answer."""
    if not has_broker(broker):
        return False
    notifier = Notifier(broker_url(broker))
    try:
        return notifier.notify(task, args, queue, priority)
    finally:
        notifier.close()


def to_absolute(spec: JobSpec) -> JobSpec:
    """The spec with its local paths made absolute: workers have other working folders."""
    places: Mapping[str, Any] = {
        "input": [_to_absolute(place) for place in spec.input],
        "output": _to_absolute(spec.output),
    }
    return spec.model_copy(update=dict(places))


def _to_absolute(place: str) -> str:
    """A trailing slash, which says folder, stays."""
    if "://" in place:
        return place
    return os.path.abspath(place) + ("/" if place.endswith("/") and place.strip("/") else "")
