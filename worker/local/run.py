"""`gristmill run` and `resume`: a job of this process, which works on it without a broker and ends with it.

Every refusal comes before anything is written. What is raised here becomes one line and an exit code in the CLI.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from gristmill.engine.checkpoint.fingerprint import fingerprint
from gristmill.engine.checkpoint.opening import check_quantization, load_checkpoint, resolve_dtype
from gristmill.engine.config import EngineOptions
from gristmill.engine.errors import EngineDied
from gristmill.engine.null_engine import is_null_url, parse_null_url
from gristmill.engine.text.tokenizer import load_tokenizer
from gristmill.jobs.client import find_job, to_absolute
from gristmill.jobs.errors import RefusedError
from gristmill.jobs.output.finalize import finalize_job
from gristmill.jobs.output.publishing import check_output, clear_output, redo_publications
from gristmill.jobs.owner import Owner, current_owner
from gristmill.jobs.plan.order import Order, check_order, plan_order
from gristmill.jobs.plan.starting import PlannedJob, start_planned
from gristmill.jobs.records import JobRecord, JobStatus, offer_for
from gristmill.jobs.source import Plan
from gristmill.jobs.spec import JobSpec, parse_spec
from gristmill.jobs.states import JobState
from gristmill.jobs.storage.folder import Storage, open_storage
from gristmill.jobs.store.database import database_url as to_database_url
from gristmill.jobs.store.store import Store, open_store
from gristmill.worker.engine.client import EngineClient
from gristmill.worker.engine.credit_window import credit_window
from gristmill.worker.engine.supervisor import EngineSupervisor, load_model
from gristmill.worker.local.follow import report_end
from gristmill.worker.run.job_context import ContextLoader, Contexts
from gristmill.worker.run.outcome import RunEnd, RunnerOptions, RunOutcome
from gristmill.worker.run.shard_runner import ShardRunner
from gristmill.worker.run.shard_source import ShardSource
from gristmill.worker.serve.stop_signals import StopSignals
from gristmill.worker.show.console import EXIT_INTERRUPTED, print_error
from gristmill.worker.show.progress import Display

INTERRUPTED_EARLY = "interrupted before it got to work; run the same command again"


class RunInterrupted(KeyboardInterrupt):
    """A signal ended the run: the message says what is safe, and how to go on."""


def run_local(
    spec: JobSpec, database_url: str | None, display: Display, signals: StopSignals | None = None
) -> int:
    """`run_job`, whose end is printed; the exit code."""
    return _report(lambda: run_job(spec, database_url, display, signals))


def resume_local(reference: str, database_url: str | None, display: Display, retry: bool = False) -> int:
    """`resume_job`, whose end is printed; the exit code."""
    return _report(lambda: resume_job(reference, database_url, display, retry))


def run_job(
    spec: JobSpec, database_url: str | None, display: Display, signals: StopSignals | None = None
) -> JobStatus:
    """Runs the job, or goes on with it if it is the same one; how it ended. Prints nothing but through `display`.

    Raises RunInterrupted when a signal came.
    """
    with _stoppable(signals) as signals:
        order = load_order(spec)
        with open_store(to_database_url(database_url)) as store:
            return LocalRun(store, order, display, signals).run()


def resume_job(reference: str, database_url: str | None, display: Display, retry: bool = False) -> JobStatus:
    """`run_job` for the job of this id or output folder; with `retry` its failed rows are computed again."""
    with _stoppable() as signals, open_store(to_database_url(database_url)) as store:
        job = find_job(store, reference)
        given = {name: value for name, value in job.spec.items() if value is not None}
        order = load_order(parse_spec(given | {"if_exists": "resume"}))
        if order.identity != job.identity:
            raise RefusedError(
                f"job {job.job_id} can't go on: its input or its model changed since it began;"
                " put them back, or run it anew with another --output"
            )
        return LocalRun(store, order, display, signals).resume(job, retry)


@contextmanager
def _stoppable(signals: StopSignals | None = None) -> Iterator[StopSignals]:
    with signals or StopSignals() as signals:
        try:
            yield signals
        except RunInterrupted:
            raise
        except KeyboardInterrupt:
            raise RunInterrupted(INTERRUPTED_EARLY) from None


def _report(run: Callable[[], JobStatus]) -> int:
    try:
        return report_end(run(), is_live=False)
    except RunInterrupted as interrupted:
        print_error(str(interrupted))
        return EXIT_INTERRUPTED


def load_order(spec: JobSpec) -> Order:
    """Reads heads of inputs and headers of the model; raises RefusedError or ModelRefused, writes nothing."""
    spec = to_absolute(spec)  # the same order whatever the working directory of the next run is
    if is_null_url(spec.model):
        parse_null_url(spec.model)
    else:
        spec = spec.model_copy(update={"model": os.path.abspath(spec.model)})
        check_quantization(load_checkpoint(spec.model), spec.quantization)
    dtype = resolve_dtype(spec.dtype)
    return check_order(spec, fingerprint(spec.model, dtype, spec.quantization, spec.kv_dtype))


class LoadedEngine(NamedTuple):
    """An engine process that has its model, and what makes requests of rows for it."""

    supervisor: EngineSupervisor
    contexts: Contexts


class LocalRun:
    """One order, carried out here."""

    def __init__(self, store: Store, order: Order, display: Display, signals: StopSignals) -> None:
        self._store = store
        self._order = order
        self._display = display
        self._signals = signals
        self._storage: Storage = open_storage(order.spec.output)
        self._owner: Owner = current_owner()

    def run(self) -> JobStatus:
        """A new job, or the one that this output folder belongs to."""
        order = self._order
        earlier = self._store.jobs.find(order.spec.output)
        if self._check(earlier) == "resume":
            assert earlier is not None
            return self._go_on(earlier)
        if earlier is not None:
            with self._held(earlier):  # raises if another process is at it
                pass
        with self._start_engine() as client:
            plan = self._plan()
            engine = self._wait_loaded(client)
            latest = self._store.jobs.find(order.spec.output)
            if latest is None or (earlier is not None and latest.job_id == earlier.job_id):
                # Before anything goes: only one process gets past here.
                job = self._store.submissions.submit_own(
                    order.spec, self._owner, order.fingerprint, order.identity
                )
                with self._held(job):
                    return self._run_job(job, plan, engine)
        return self.run()  # somebody began a job here meanwhile

    def resume(self, job: JobRecord, retry: bool = False) -> JobStatus:
        """The job that was asked for; `retry`: its failed rows too."""
        if retry:
            with self._held(job):
                num_rows = self._store.ends.retry_failed(job.job_id)
            self._display.note(f"{job.job_id}: {num_rows:,} failed rows are computed again")
            job = self._store.jobs.load(job.job_id)
        if self._check(job) != "resume":
            raise RefusedError(
                f"{self._storage.root} no longer holds the parts of job {job.job_id}: run it anew"
            )
        return self._go_on(job)

    def _check(self, job: JobRecord | None) -> str:
        spec = self._order.spec
        uris = [source.uri for source in self._order.sources]
        return check_output(self._storage, job, self._order.identity, spec.if_exists, uris)

    def _go_on(self, job: JobRecord) -> JobStatus:
        """A job that exists: whatever is left of it."""
        if job.state is JobState.COMPLETED:
            return self._finish(job.job_id)
        with self._held(job):
            self._store.ends.finish_cancel(job.job_id)
            state = self._store.ends.resume(job.job_id)
            if state is JobState.FINALIZING:
                return self._finish(job.job_id)
            with self._start_engine() as client:
                plan = self._plan() if state is JobState.VALIDATING else None
                return self._run_job(job, plan, self._wait_loaded(client))

    def _plan(self) -> Plan:
        """The shards, at the rate that was learned."""
        spec = self._order.spec
        rows_per_s = self._store.jobs.learned_rows_per_s(self._order.fingerprint, spec.max_tokens)
        if rows_per_s is None and is_null_url(spec.model):
            rows_per_s = parse_null_url(spec.model).rows_per_s
        return plan_order(self._order, rows_per_s)

    def _start_job(self, job_id: str, plan: Plan) -> bool:
        """Puts a submitted job in progress; False when it was stopped. Where that pays, its rows are sorted first."""
        if self._store.plans.claim(job_id, self._owner) is None:
            return False
        try:
            return start_planned(
                self._store,
                self._storage,
                self._owner,
                PlannedJob(job_id, self._order, plan),
                self._signals.should_stop,
                partial(clear_output, self._storage),
                self._display.note,
            )
        finally:
            self._store.plans.release(job_id, self._owner)

    @contextmanager
    def _held(self, job: JobRecord) -> Iterator[None]:
        self._store.jobs.hold(job.job_id, self._owner)
        try:
            yield
        finally:
            self._store.jobs.release(job.job_id, self._owner)

    @contextmanager
    def _start_engine(self) -> Iterator[EngineClient]:
        """An engine process that begins to load its model; it is gone at the end, whatever happens."""
        spec = self._order.spec
        options = EngineOptions(dtype=spec.dtype, quantization=spec.quantization, kv_dtype=spec.kv_dtype)
        client = EngineClient(spec.model, options)
        try:
            client.start()
            yield client
        finally:
            client.kill()

    def _wait_loaded(self, client: EngineClient) -> LoadedEngine:
        self._display.note(f"loading {self._order.spec.model}")
        tokenizer = load_tokenizer(self._order.spec.model)
        try:
            info = load_model(client, self._signals.should_stop, self._display.note)
        except EngineDied:
            if self._signals.should_stop():
                raise KeyboardInterrupt from None
            raise
        supervisor = EngineSupervisor(client, credit_window(self._order.spec.model, info))
        return LoadedEngine(supervisor, Contexts(ContextLoader(self._store.jobs, tokenizer, info).load))

    def _run_job(self, job: JobRecord, plan: Plan | None, engine: LoadedEngine) -> JobStatus:
        """Starts a job that has only been submitted, by `plan`; runs its shards."""
        if plan is not None and not self._start_job(job.job_id, plan):
            if self._signals.should_stop():
                raise KeyboardInterrupt
            return self._finish(job.job_id)
        redo_publications(self._storage, self._store.shards, job.job_id)
        status = self._store.jobs.status(job.job_id)
        num_done = status.rows - status.not_run
        if num_done:
            self._display.note(f"{job.job_id} goes on: {num_done:,} of {status.rows:,} rows are done")
        self._display.start(status.rows, num_done, job.job_id)
        try:
            with self._signals.deferred():
                outcome = ShardRunner(
                    self._store,
                    ShardSource(self._store.claims, offer_for(job), self._owner),
                    engine.supervisor,
                    engine.contexts,
                    self._display,
                    self._signals.should_stop,
                    RunnerOptions(max_errors=self._order.spec.max_num_errors(status.rows)),
                ).run()
        finally:
            self._display.stop()
        return self._conclude(job.job_id, outcome)

    def _conclude(self, job_id: str, outcome: RunOutcome) -> JobStatus:
        """What the end of the loop means for the job."""
        if outcome.end is RunEnd.INTERRUPTED:
            status = self._store.jobs.status(job_id)
            raise RunInterrupted(
                f"interrupted: {status.rows - status.not_run:,} of {status.rows:,} rows are done and safe;"
                f" run the same command again, or: gristmill resume {job_id}"
            )
        if outcome.end not in (RunEnd.FINISHED, RunEnd.CANCELLED):
            self._store.ends.stop(job_id, JobState.FAILED, outcome.message or outcome.end.value)
        return self._finish(job_id)

    def _finish(self, job_id: str) -> JobStatus:
        """Ends a job of which no shard is left, or that was stopped, unless it has ended."""
        try:
            finalize_job(self._store, self._storage, job_id, self._owner)
        except KeyboardInterrupt:
            raise RunInterrupted(
                "interrupted at the end: all rows are done and safe; run the same command again"
            ) from None
        self._store.ends.finish_cancel(job_id)
        return self._store.jobs.status(job_id)
