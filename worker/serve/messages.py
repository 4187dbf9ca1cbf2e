"""What the queue's messages do here: take a submission, plan, wake the pool. Any message may be lost, doubled or stale.

MessageHandlers does the work and knows no Celery; add_tasks puts it behind Celery's task names.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gristmill.jobs.broker import (
    ACKNOWLEDGE,
    CONTROL_QUEUE,
    PLAN_JOB,
    PLAN_PIECE,
    RUN_SHARDS,
    SUBMIT,
    Notify,
    model_queue,
)
from gristmill.jobs.errors import JobsError, RefusedError, StoreError, Unavailable
from gristmill.jobs.owner import Owner
from gristmill.jobs.plan.planner import plan_one_piece, plan_submitted_job
from gristmill.jobs.records import JobRecord
from gristmill.jobs.spec import parse_spec
from gristmill.jobs.states import JobState
from gristmill.jobs.store.store import Store

if TYPE_CHECKING:
    from celery import Celery

RETRY_S = 1.0
MAX_KEY_CHARS = 255
MAX_NOTIFICATIONS = 8  # for one job: more workers than that find it by themselves

logger = logging.getLogger(__name__)


class StoppingError(Exception):
    """The worker stops before the message could be dealt with: it goes back to the queue."""


class MessageHandlers:
    """The tasks as plain methods, for the pool's threads."""

    def __init__(
        self,
        store: Store,
        owner: Owner,
        allow: Sequence[str],
        notify: Notify,
        wake: Callable[[str | None], None],
    ) -> None:
        self._store = store
        self._owner = owner
        self._allow = tuple(allow)
        self._notify = notify
        self._wake = wake
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Ends every wait for a database that is down."""
        self._stopping.set()

    def submit(self, fields: Mapping[str, Any], task_id: str) -> JobRecord:
        """The job of these fields of JobSpec; one that is wrong becomes a failed job that says why.

        The message is the only place where the submission is: while the database is down this waits. Raises
        StoppingError when the worker stops meanwhile.
        """
        while True:
            try:
                return self._submit(dict(fields), task_id)
            except Unavailable as error:
                logger.warning("a submission waits for the database (%s)", error)
            if self._stopping.wait(RETRY_S):
                raise StoppingError

    def plan_job(self, job_id: str) -> None:
        """Plans a submitted job, or cuts its planning into pieces for everybody."""
        if self._store.jobs.load(job_id).state is not JobState.VALIDATING:
            return
        pieces = plan_submitted_job(self._store, job_id, self._owner, self._allow, self._stopping.is_set)
        for piece_index in pieces:
            if not self._notify(PLAN_PIECE, [job_id, piece_index], CONTROL_QUEUE):
                return
        if not pieces:
            self._announce(job_id)

    def plan_piece(self, job_id: str, piece_index: int) -> None:
        """Plans one piece of a large job."""
        if plan_one_piece(self._store, job_id, piece_index, self._stopping.is_set):
            self._announce(job_id)

    def run_shards(self, model: str) -> None:
        """There may be work for this model."""
        self._wake(model)

    def acknowledge(self, job_id: str) -> None:
        """The user's on_complete task has heard of the job's end."""
        self._store.notices.acknowledge(job_id)

    def _submit(self, fields: dict[str, Any], task_id: str) -> JobRecord:
        key = fields.pop("idempotency_key", None) or task_id
        if not isinstance(key, str) or len(key) > MAX_KEY_CHARS:
            message = f"idempotency_key must be a text of {MAX_KEY_CHARS} characters at most"
            return self._store.submissions.submit_refused(fields, task_id, message)
        try:
            spec = parse_spec(fields)
        except RefusedError as error:
            return self._store.submissions.submit_refused(fields, key, str(error))
        try:
            submitted = self._store.submissions.submit(spec, key)
        except Unavailable:
            raise
        except (StoreError, RefusedError) as error:  # a text that this database can't hold
            return self._store.submissions.submit_refused({}, key, str(error))
        if submitted.is_new:
            self._notify(PLAN_JOB, [submitted.job.job_id], CONTROL_QUEUE)
        return submitted.job

    def _announce(self, job_id: str) -> None:
        """Wakes this worker and others for a job that has just been planned."""
        job = self._store.jobs.load(job_id)
        if job.state is not JobState.IN_PROGRESS:
            return
        self._wake(job.model)
        if job.num_shards > 1 and job.model in self._store.workers.known_models():
            for _ in range(min(job.num_shards - 1, MAX_NOTIFICATIONS)):
                if not self._notify(RUN_SHARDS, [job.model], model_queue(job.model)):
                    return


def add_tasks(app: Celery, handlers: MessageHandlers) -> None:  # noqa: C901 - five tasks of a few lines
    """Registers the five tasks on the application."""
    from celery.exceptions import Reject

    def guard(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except StoppingError:
            raise Reject(name, requeue=True) from None
        except JobsError as error:
            logger.warning("%s: %s", name, error)
        except Exception as error:  # the border of a task: an unknown error's text may hold prompts
            logger.error("%s failed: %s", name, type(error).__name__)

    @app.task(name=SUBMIT, bind=True, acks_late=True, shared=False)  # type: ignore[untyped-decorator]
    def submit(self: Any, *args: Any, **fields: Any) -> None:
        if args:
            fields = {f"argument {index}": None for index in range(len(args))}  # refused, by name
        guard(SUBMIT, lambda: handlers.submit(fields, self.request.id))

    @app.task(name=PLAN_JOB, shared=False)  # type: ignore[untyped-decorator]
    def plan_job(job_id: str) -> None:
        guard(PLAN_JOB, lambda: handlers.plan_job(str(job_id)))

    @app.task(name=PLAN_PIECE, shared=False)  # type: ignore[untyped-decorator]
    def plan_piece(job_id: str, piece_index: int) -> None:
        guard(PLAN_PIECE, lambda: handlers.plan_piece(str(job_id), int(piece_index)))

    @app.task(name=RUN_SHARDS, shared=False)  # type: ignore[untyped-decorator]
    def run_shards(model: str) -> None:
        guard(RUN_SHARDS, lambda: handlers.run_shards(str(model)))

    @app.task(name=ACKNOWLEDGE, shared=False)  # type: ignore[untyped-decorator]
    def acknowledge(job_id: str) -> None:
        guard(ACKNOWLEDGE, lambda: handlers.acknowledge(str(job_id)))
