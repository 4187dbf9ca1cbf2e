"""`gristmill run` and `resume`: a whole job in this process, with the store, shards and commits of a cluster.

Every refusal comes before anything is written. What is raised here becomes one line and an exit code in the
CLI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from gristmill.engine.config import EngineOptions
from gristmill.engine.errors import EngineDied
from gristmill.engine.request import EngineInfo
from gristmill.engine.text.tokenizer import Tokenizer, load_tokenizer
from gristmill.jobs.client import find_job
from gristmill.jobs.errors import RefusedError
from gristmill.jobs.output.finalize import finalize_job
from gristmill.jobs.output.publishing import check_output, clear_output, redo_publications
from gristmill.jobs.owner import Owner, current_owner
from gristmill.jobs.records import JobRecord, JobStatus, offer_for
from gristmill.jobs.spec import JobSpec, parse_spec
from gristmill.jobs.states import RESUMABLE_JOB_STATES, JobState
from gristmill.jobs.storage.folder import Storage, open_storage
from gristmill.jobs.store.database import database_url as to_database_url
from gristmill.jobs.store.store import Store, open_store
from gristmill.worker.engine.client import EngineClient
from gristmill.worker.engine.credit_window import credit_window
from gristmill.worker.engine.supervisor import EngineSupervisor, load_model
from gristmill.worker.local.follow import report_end
from gristmill.worker.local.order import LocalOrder, LocalPlan, create_job, load_order, planned_order
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


def resume_local(reference: str, database_url: str | None, display: Display) -> int:
    """`go_on_with_job`, whose end is printed; the exit code."""
    return _report(lambda: go_on_with_job(reference, database_url, display))


def retry_local(reference: str, database_url: str | None, display: Display) -> int:
    """`resume_local` of the job's failed rows."""
    return _report(lambda: go_on_with_job(reference, database_url, display, retry=True))


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


def go_on_with_job(
    reference: str, database_url: str | None, display: Display, retry: bool = False
) -> JobStatus:
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
        run = LocalRun(store, order, display, signals)
        return run.retry(job) if retry else run.resume(job)


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


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine process that has its model, and the model's tokenizer on our side."""

    client: EngineClient
    info: EngineInfo
    tokenizer: Tokenizer


class LocalRun:
    """One order, carried out here."""

    def __init__(self, store: Store, order: LocalOrder, display: Display, signals: StopSignals) -> None:
        self._store = store
        self._order = order
        self._display = display
        self._signals = signals
        self._storage: Storage = open_storage(order.spec.output)
        self._owner: Owner = current_owner()

    def run(self) -> JobStatus:
        """A new job, or the one that this output folder belongs to."""
        job = self._store.jobs.find(self._order.spec.output)
        if self._check(job) == "resume":
            assert job is not None
            return self._go_on(job)
        return self._begin(job)

    def retry(self, job: JobRecord) -> JobStatus:
        """The failed rows of the job that was asked for."""
        with self._held(job):
            num_rows = self._store.ends.retry_failed(job.job_id)
        self._display.note(f"{job.job_id}: {num_rows:,} failed rows are computed again")
        return self.resume(self._store.jobs.load(job.job_id))

    def resume(self, job: JobRecord) -> JobStatus:
        """The job that was asked for."""
        if self._check(job) != "resume":
            raise RefusedError(
                f"{self._storage.root} no longer holds the parts of job {job.job_id}: run it anew"
            )
        return self._go_on(job)

    def _check(self, job: JobRecord | None) -> str:
        spec = self._order.spec
        uris = [source.uri for source in self._order.sources]
        return check_output(self._storage, job, self._order.identity, spec.if_exists, uris)

    def _begin(self, earlier: JobRecord | None) -> JobStatus:
        """A new job. `earlier` is the job whose output it replaces."""
        if earlier is not None:
            with self._held(earlier):  # raises if another process is at it
                pass
        with self._start_engine() as client, self._plan() as planned:
            engine = self._wait_loaded(client)
            latest = self._store.jobs.find(self._order.spec.output)
            is_first = latest is None or (earlier is not None and latest.job_id == earlier.job_id)
            if is_first:
                # Before anything goes: only one process gets past here.
                job = create_job(self._order, planned, self._store, self._owner)
                with self._held(job):
                    clear_output(self._storage, planned.spool_id)
                    return self._run_shards(job, engine)
        return self.run()  # somebody began a job here meanwhile

    def _go_on(self, job: JobRecord) -> JobStatus:
        """A job that exists: whatever is left of it."""
        if job.state is JobState.COMPLETED:
            return self._store.jobs.status(job.job_id)
        with self._held(job):
            if job.state is JobState.CANCELLING:
                self._store.ends.finish_cancel(job.job_id)
            if job.state is JobState.CANCELLING or job.state in RESUMABLE_JOB_STATES:
                self._store.ends.resume(job.job_id)
            if job.state is JobState.FINALIZING:
                return self._finalize(job.job_id)
            with self._start_engine() as client:
                return self._run_shards(job, self._wait_loaded(client))

    def _plan(self) -> AbstractContextManager[LocalPlan]:
        return planned_order(
            self._order, self._store, self._storage, self._signals.should_stop, self._display.note
        )

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
        engine_options = EngineOptions(
            dtype=spec.dtype, quantization=spec.quantization, kv_dtype=spec.kv_dtype
        )
        client = EngineClient(spec.model, engine_options)
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
        return LoadedEngine(client, info, tokenizer)

    def _run_shards(self, job: JobRecord, engine: LoadedEngine) -> JobStatus:
        redo_publications(self._storage, self._store.shards, job.job_id)
        status = self._store.jobs.status(job.job_id)
        num_done = status.rows - status.not_run
        if num_done:
            self._display.note(f"{job.job_id} goes on: {num_done:,} of {status.rows:,} rows are done")
        self._display.start(status.rows, num_done, job.job_id)
        try:
            with self._signals.deferred():
                outcome = self._build_runner(job, status, engine).run()
        finally:
            self._display.stop()
        return self._conclude(job.job_id, outcome)

    def _build_runner(self, job: JobRecord, status: JobStatus, engine: LoadedEngine) -> ShardRunner:
        spec = self._order.spec
        return ShardRunner(
            self._store,
            ShardSource(self._store.claims, offer_for(job), self._owner),
            EngineSupervisor(engine.client, credit_window(spec.model, engine.info)),
            Contexts(ContextLoader(self._store.jobs, engine.tokenizer, engine.info).load),
            self._display,
            self._signals.should_stop,
            RunnerOptions(max_errors=spec.max_num_errors(status.rows)),
        )

    def _conclude(self, job_id: str, outcome: RunOutcome) -> JobStatus:
        """What the end of the loop means for the job."""
        if outcome.end is RunEnd.FINISHED:
            return self._finalize(job_id)
        if outcome.end is RunEnd.INTERRUPTED:
            status = self._store.jobs.status(job_id)
            raise RunInterrupted(
                f"interrupted: {status.rows - status.not_run:,} of {status.rows:,} rows are done and safe;"
                f" run the same command again, or: gristmill resume {job_id}"
            )
        if outcome.end is not RunEnd.CANCELLED:
            self._store.ends.stop(job_id, JobState.FAILED, outcome.message or outcome.end.value)
        self._store.ends.finish_cancel(job_id)
        return self._store.jobs.status(job_id)

    def _finalize(self, job_id: str) -> JobStatus:
        try:
            state = finalize_job(self._store, self._storage, job_id, self._owner)
        except KeyboardInterrupt:
            raise RunInterrupted(
                "interrupted at the end: all rows are done and safe; run the same command again"
            ) from None
        if state is JobState.CANCELLING:  # asked for when the last shard was done
            self._store.ends.finish_cancel(job_id)
        return self._store.jobs.status(job_id)
