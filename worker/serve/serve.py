"""`gristmill worker`: puts the pool (which does the work) and Celery (which brings messages) together until a signal.

What can't work is refused at the start; what does not answer yet is waited for.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from gristmill.engine.config import EngineOptions
from gristmill.jobs.broker import Notifier, broker_url
from gristmill.jobs.errors import JobsError, RefusedError, Unavailable
from gristmill.jobs.storage.s3.check import check_s3
from gristmill.jobs.store.database import database_url
from gristmill.jobs.store.models import LEASE_S
from gristmill.jobs.store.store import Store, open_store
from gristmill.worker.engine.supervisor import ENGINE_TIMEOUT_S
from gristmill.worker.serve.catalog import Catalog, load_catalog
from gristmill.worker.serve.celery_app import CeleryHost, build_app
from gristmill.worker.serve.messages import MessageHandlers
from gristmill.worker.serve.stop_signals import StopSignals
from gristmill.worker.show.console import EXIT_FAILED, print_error
from gristmill.worker.show.log_lines import set_up_logging
from gristmill.worker.version import load_version

if TYPE_CHECKING:
    from gristmill.worker.serve.model_pool import ModelPool

STOP_S = 10.0  # from the signal to the exit
CELERY_STOP_S = 1.5  # of them, for Celery to notice
MAX_CELERY_STOP_S = 4.0  # what it may take longer when the pool was quick: a task may be at its end
LOOK_S = 0.5
RETRY_S = 2.0
MIN_SECONDS, MAX_SECONDS = 0.5, 86_400.0
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The words of `gristmill worker`."""

    models: tuple[str, ...] = ()  # NAME=PATH
    model_folders: tuple[str, ...] = ()
    max_models: int = 1  # loaded at once
    engine_options: EngineOptions = EngineOptions()
    allow: tuple[str, ...] = ()
    database_url: str | None = None
    broker_url: str | None = None


def run_worker(options: WorkerOptions) -> int:
    """Serves until a signal, a remote shutdown or an ill host; the exit code.

    Raises RefusedError or ModelRefused when it can't begin.
    """
    set_up_logging()
    url = broker_url(options.broker_url)
    allow = load_allow(options.allow)
    lease_s = load_seconds("GRISTMILL_LEASE_S", LEASE_S)
    engine_timeout_s = load_seconds("GRISTMILL_ENGINE_TIMEOUT_S", ENGINE_TIMEOUT_S)
    with StopSignals() as signals:
        try:
            catalog = wait_for(
                lambda: load_catalog(
                    options.models, options.model_folders, engine_options=options.engine_options
                )
            )
            database = database_url(options.database_url)
            with wait_for(lambda: open_store(database, lease_s=lease_s)) as store:
                check_endpoints(allow)
                notifier = Notifier(url)
                from gristmill.worker.serve.model_host import HostOptions  # late: a refusal is quick
                from gristmill.worker.serve.model_pool import ModelPool

                pool = ModelPool(
                    store,
                    catalog,
                    HostOptions(allow, options.engine_options, lease_s, engine_timeout_s),
                    max_models=options.max_models,
                    notify=notifier.notify,
                    version=load_version(),
                )
                return serve(pool, store, catalog, url, notifier, signals)
        except KeyboardInterrupt:
            return signals.exit_code


def serve(
    pool: ModelPool, store: Store, catalog: Catalog, url: str, notifier: Notifier, signals: StopSignals
) -> int:
    """Runs the pool and Celery together; the exit code."""
    handlers = MessageHandlers(store, pool.owner, pool.allow, notifier.notify, pool.wake)
    host = CeleryHost(url, build_app(url, handlers, catalog.names))
    wait_for(pool.start)
    signals.defer()
    host.start()
    facts = {"id": pool.worker_id, "models": ",".join(catalog.names), "allow": ",".join(pool.allow)}
    logger.info("the worker is up", extra=facts)
    while not (signals.wait(LOOK_S) or host.was_shut_down or pool.failure):
        pass
    logger.info("the worker stops: finished rows are committed, the others go back to the queue")
    has_ended = stop_all(pool, handlers, host)
    notifier.close()
    code = EXIT_FAILED if pool.failure else signals.exit_code
    logger.info("the worker has stopped", extra={"exit_code": code})
    if pool.failure:
        print_error(pool.failure)
    if not has_ended:  # the interpreter would wait for the threads that hang
        sys.stdout.flush()
        os._exit(code)
    return code


def stop_all(pool: ModelPool, handlers: MessageHandlers, host: CeleryHost) -> bool:
    """Ends everything within STOP_S; False when Celery or a task of it hangs, and has to be left behind."""
    deadline = time.monotonic() + STOP_S
    handlers.stop()
    host.stop()
    try:
        if not pool.stop(STOP_S - CELERY_STOP_S):
            logger.warning(
                "not everything could be handed back in time; others take over when the lease is over"
            )
    except JobsError as error:
        logger.warning("not everything could be handed back (%s); others take over", error)
    return host.join(min(MAX_CELERY_STOP_S, max(CELERY_STOP_S, deadline - time.monotonic())))


def load_allow(flags: Sequence[str]) -> tuple[str, ...]:
    """The roots below which submitted jobs may read and write: the flags, else GRISTMILL_ALLOW_URIS."""
    given = [text.strip() for text in flags or os.environ.get("GRISTMILL_ALLOW_URIS", "").split(",")]
    roots = [text if "://" in text else os.path.abspath(os.path.expanduser(text)) for text in given if text]
    if not roots:
        raise RefusedError(
            "no place is allowed: submitted jobs read and write only below --allow-uri FOLDER or s3://BUCKET/PREFIX"
            " (repeatable), or GRISTMILL_ALLOW_URIS (separated by commas); give at least one"
        )
    return tuple(roots)


def load_seconds(name: str, usual_s: float) -> float:
    """An environment variable that holds seconds, else the usual value."""
    text = os.environ.get(name)
    if not text:
        return usual_s
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise RefusedError(
            f"{name} is {text!r}: write seconds from {MIN_SECONDS} to {MAX_SECONDS}, or unset it"
        )
    return seconds


def check_endpoints(allow: Sequence[str]) -> None:
    """Tries the object store below each allowed root. A root may be for reading only, so a failure is a warning."""
    for root in allow:
        if root.startswith("s3://"):
            try:
                check_s3(root)
            except JobsError as error:
                logger.warning("jobs can't write below %s: %s", root, error)


def wait_for(call: Callable[[], T]) -> T:
    """The value of `call`, tried again for as long as a service does not answer."""
    last = ""
    while True:
        try:
            return call()
        except Unavailable as error:
            if str(error) != last:
                logger.warning("waits: %s", error)
            last = str(error)
        time.sleep(RETRY_S)
