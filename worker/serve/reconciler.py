"""What keeps submitted jobs going when messages are lost and workers vanish: deadlines, ends, plans, notices.

Every worker does it. Each duty asks the database what is due and is idempotent, so any number may do it at once.
Two lanes, each a thread: what is quick must not wait for a job that takes minutes to plan or to finalize.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gristmill.jobs.broker import CONTROL_QUEUE, PLAN_PIECE, Notify
from gristmill.jobs.errors import JobsError, StoreError, StoreUnavailable, Unavailable
from gristmill.jobs.output.finalize import finalize_job
from gristmill.jobs.output.publishing import publish_part
from gristmill.jobs.owner import Owner
from gristmill.jobs.plan.planner import plan_one_piece, plan_submitted_job
from gristmill.jobs.records import WorkerModel
from gristmill.jobs.states import JobState
from gristmill.jobs.storage.folder import open_storage
from gristmill.jobs.store.store import Store

logger = logging.getLogger(__name__)

TICK_S = 0.5
PLAN_PATIENCE_S = 5.0  # a plan is left to Celery's message for so long
_MAX_PLANS = 8  # jobs in one turn
_MAX_PIECES_S = 2.0  # for pieces in one turn: jobs wait to be finalized meanwhile
_STOP_JOIN_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who does the work, and where it may."""

    worker_id: str
    owner: Owner
    allow: Sequence[str]
    version: str = ""


class WorkerFigures(NamedTuple):
    """What the workers row tells of this process."""

    models: Sequence[WorkerModel]
    num_shards: int
    num_rows_in_flight: int


@dataclass(slots=True)
class _Duty:
    name: str
    every_s: float
    run: Callable[[float], None]
    next_s: float = 0.0
    is_ill: bool = False


class Reconciler:
    """The duties of one worker. `run_once` does those that are due; `start` does so in two threads until `stop`."""

    def __init__(
        self,
        store: Store,
        worker: WorkerIdentity,
        notify: Notify,
        is_stopping: Callable[[], bool],
        figures: Callable[[], WorkerFigures],
        work_began: Callable[[], None] = lambda: None,
    ) -> None:
        """figures: asked for at each refresh of the workers row. work_began: called when a job was planned here."""
        self._store = store
        self._worker = worker
        self._notify = notify
        self._is_stopping = is_stopping
        self._figures = figures
        self._work_began = work_began
        self._quick = [
            _Duty("beat", 5.0, self._beat),
            _Duty("expire", 1.0, self._expire),
            _Duty("drain", 1.0, self._drain),
            _Duty("notices", 2.0, self._send_notices),
        ]
        self._slow = [
            _Duty("publish", 1.0, self._publish),
            _Duty("finalize", 1.0, self._finalize),
            _Duty("plan", 2.0, self._plan),
        ]
        self._to_publish: set[str] = set()  # stopped jobs
        self._unfinished: set[str] = set()  # claimed here: another try need not wait for the lease
        self._waiting_since: dict[str, float] = {}  # jobs to plan
        self._pieces: list[tuple[str, int]] = []  # (job, piece) to plan
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def run_once(self, now: float) -> None:
        """Does every duty that is due at `now` (a monotonic time); raises nothing."""
        self._run_lane(self._quick, now)
        self._run_lane(self._slow, now)

    def start(self) -> None:
        """Begins both lanes."""
        for name, duties in (("quick", self._quick), ("slow", self._slow)):
            thread = threading.Thread(
                target=self._loop, args=(duties,), name=f"reconciler-{name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def stop(self, timeout_s: float = _STOP_JOIN_S) -> None:
        """Ends both lanes after what they are at; a long finalization is left to another worker."""
        self._ended.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _loop(self, duties: list[_Duty]) -> None:
        while not (self._ended.is_set() or self._is_stopping()):
            self._run_lane(duties, time.monotonic())
            self._ended.wait(TICK_S)

    def _run_lane(self, duties: list[_Duty], now: float) -> None:
        for duty in duties:
            if now >= duty.next_s and not self._is_stopping():
                duty.next_s = now + duty.every_s
                self._run_duty(duty, now)

    def _run_duty(self, duty: _Duty, now: float) -> None:
        """A fault is said once, and the duty is tried again at its next turn."""
        try:
            duty.run(now)
        except JobsError as error:
            if not duty.is_ill:
                logger.warning("reconciler: %s waits: %s", duty.name, error)
            duty.is_ill = True
        except (
            Exception
        ):  # the process border of a thread: without reconciler no job of this worker would end
            if not duty.is_ill:
                logger.exception("reconciler: %s failed", duty.name)
            duty.is_ill = True
        else:
            if duty.is_ill:
                logger.info("reconciler: %s works again", duty.name)
            duty.is_ill = False

    def _beat(self, now: float) -> None:
        figures = self._figures()
        worker = self._worker
        if not self._store.workers.beat(worker.worker_id, *figures):  # cleaned away while we were paused
            self._store.workers.register(worker.worker_id, worker.owner, figures.models, worker.version)

    def _expire(self, now: float) -> None:
        for job_id in self._store.ends.expire():
            logger.info("job %s is past its deadline", job_id)

    def _drain(self, now: float) -> None:
        for job_id in self._store.ends.drain_stopped():
            self._to_publish.add(job_id)
            logger.info("job %s has stopped", job_id)

    def _send_notices(self, now: float) -> None:
        for notice in self._store.notices.due():
            if not self._notify(notice.task, [notice.payload], notice.queue):
                return  # the broker is away: all of them stay due
            self._store.notices.mark_sent(notice.job_id, notice.number)

    def _publish(self, now: float) -> None:
        """Parts of stopped jobs that were committed by a process that died before it gave them their names."""
        faults: list[JobsError] = []
        for job_id in sorted(self._to_publish):
            if self._is_stopping():
                return
            try:
                self._publish_job(job_id)
            except Unavailable as error:
                faults.append(error)
                continue
            except JobsError as error:
                logger.warning("a part of job %s can't be published: %s", job_id, error)
            self._to_publish.discard(job_id)
        if faults:
            raise faults[0]

    def _publish_job(self, job_id: str) -> None:
        job = self._store.jobs.load(job_id)
        latest = self._store.jobs.find(job.output)
        if latest is None or latest.job_id != job_id:  # the folder is a newer job's
            return
        storage = open_storage(job.output)
        for shard_id, part, _ in self._store.shards.unpublished_parts(job_id):
            publish_part(storage, self._store.shards, shard_id, part)

    def _finalize(self, now: float) -> None:
        """Ends the jobs that have no open shard. One whose place does not answer does not hold up the others."""
        due = dict.fromkeys([*self._store.finalizing.waiting(), *sorted(self._unfinished)])
        faults: list[JobsError] = []
        for job_id in due:
            if self._is_stopping():
                return
            self._unfinished.discard(job_id)
            try:
                self._finalize_job(job_id)
            except Unavailable as error:
                self._unfinished.add(job_id)
                faults.append(error)
        if faults:
            raise faults[0]

    def _finalize_job(self, job_id: str) -> None:
        """What can't be repaired by waiting fails the job, with the reason: `resume` tries again."""
        try:
            output = self._store.jobs.load(job_id).output
            finalize_job(self._store, open_storage(output), job_id, self._worker.owner)
        except (StoreError, Unavailable):
            raise
        except Exception as error:  # the border of a job: else it would be finalizing for ever
            reason = str(error) if isinstance(error, JobsError) else f"internal error, {error!r}"
            logger.warning("job %s can't be finalized: %s", job_id, reason)
            claim = self._store.finalizing.claim(job_id, self._worker.owner)
            if claim is not None:
                self._store.finalizing.complete(claim, JobState.FAILED, reason)

    def _plan(self, now: float) -> None:
        """Plans here what no message has brought to be planned: the broker lost it, or is away."""
        waiting = self._store.plans.waiting()
        self._waiting_since = {job_id: self._waiting_since.get(job_id, now) for job_id in waiting}
        late = [job_id for job_id, since in self._waiting_since.items() if now - since >= PLAN_PATIENCE_S]
        self._send_pieces(self._store.pieces.waiting())
        faults: list[JobsError] = []
        for job_id in late[:_MAX_PLANS]:
            try:
                self._plan_job(job_id)
            except StoreUnavailable:
                raise
            except Unavailable as error:  # this job's input or output is away; the next one's need not be
                faults.append(error)
        end = time.monotonic() + _MAX_PIECES_S
        while self._pieces and time.monotonic() < end and not self._is_stopping():
            # From the back, while messages are taken from the front. One that fails comes again by pieces_to_plan.
            if plan_one_piece(self._store, *self._pieces.pop(), self._is_stopping):
                self._work_began()
        if faults:
            raise faults[0]

    def _plan_job(self, job_id: str) -> None:
        if self._is_stopping():
            return
        pieces = plan_submitted_job(
            self._store, job_id, self._worker.owner, self._worker.allow, self._is_stopping
        )
        if pieces:
            self._send_pieces([(job_id, index) for index in pieces])
        else:
            self._work_began()

    def _send_pieces(self, pieces: Sequence[tuple[str, int]]) -> None:
        """Offers pieces to all workers; here they are planned too, in case that nobody hears of it."""
        self._pieces = list(dict.fromkeys([*self._pieces, *pieces]))
        for job_id, index in pieces:
            if not self._notify(PLAN_PIECE, [job_id, index], CONTROL_QUEUE):
                return
