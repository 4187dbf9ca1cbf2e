"""What a worker process does besides answering Celery: model hosts that run shards, and the reconciler.

The database says which models are wanted; the pool keeps as many of them loaded as it may. It needs no
message to work: one only wakes it earlier.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Sequence

from gristmill.jobs.broker import Notify
from gristmill.jobs.errors import JobsError, Unavailable
from gristmill.jobs.owner import Owner, current_owner
from gristmill.jobs.records import WorkerModel
from gristmill.jobs.store.store import Store
from gristmill.worker.serve.catalog import Catalog, CatalogEntry
from gristmill.worker.serve.model_host import HostOptions, ModelHost
from gristmill.worker.serve.reconciler import Reconciler, WorkerFigures, WorkerIdentity

TICK_S = 2.0
IDLE_S = 5.0  # a model with no work for so long makes room for another
PATIENCE_S = 60.0  # a model that waits for longer gets room when the shards at hand are done

logger = logging.getLogger(__name__)


class ModelPool:
    """One worker's hosts and its reconciler. `failure` is set when the worker should end: its host is ill."""

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        options: HostOptions,
        *,
        max_models: int,
        notify: Notify,
        version: str = "",
    ) -> None:
        self.owner: Owner = current_owner()
        self.worker_id = f"worker_{uuid.uuid4().hex[:16]}"
        self.allow = tuple(options.allow)
        self.failure: str | None = None
        self._store = store
        self._catalog = catalog
        self._max_models = max_models
        self._version = version
        self._options = options
        self._hosts: dict[CatalogEntry, ModelHost] = {}
        self._idle_since: dict[CatalogEntry, float] = {}
        self._wanted_since: dict[CatalogEntry, float] = {}
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool", daemon=True)
        identity = WorkerIdentity(self.worker_id, self.owner, self.allow, version)
        self._reconciler = Reconciler(store, identity, notify, self._stopping.is_set, self.figures, self.wake)

    def start(self) -> None:
        """Registers the worker, and begins. Raises StoreError when the database refuses."""
        self._store.workers.register(self.worker_id, self.owner, self.figures().models, self._version)
        self._reconciler.start()
        self._thread.start()

    def wake(self, model: str | None = None) -> None:
        """There may be work for this model (None: for any)."""
        for entry, host in list(self._hosts.items()):
            if model in (None, entry.name):
                host.wake()
        self._woken.set()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Commits what is finished and gives the rest back; False when that took longer than timeout_s."""
        deadline = time.monotonic() + timeout_s
        self._stopping.set()
        self._woken.set()
        hosts = list(self._hosts.values())
        for host in hosts:
            host.stop()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        is_done = all([host.join(max(0.0, deadline - time.monotonic())) for host in hosts])
        self._reconciler.stop(max(0.0, deadline - time.monotonic()))
        try:
            self._store.workers.stop(self.worker_id, self.failure)
        except Unavailable as error:
            logger.warning("the worker could not sign off: %s", error)
        return is_done

    def figures(self) -> WorkerFigures:
        """What the workers row shows."""
        hosts = dict(self._hosts)
        models = [
            WorkerModel(entry.name, entry.fingerprint, entry.dtype, entry in hosts and hosts[entry].is_loaded)
            for entry in self._catalog.entries()
        ]
        return WorkerFigures(
            models,
            sum(host.num_shards for host in hosts.values()),
            sum(host.num_rows_in_flight for host in hosts.values()),
        )

    def run_once(self, now: float) -> None:
        """Removes hosts that ended, and starts those that are wanted as far as there is room."""
        for entry, host in list(self._hosts.items()):
            if not host.is_alive:
                del self._hosts[entry]
                self.failure = self.failure or host.failure
            elif host.num_shards:
                self._idle_since.pop(entry, None)
            else:
                self._idle_since.setdefault(entry, now)
        if self.failure is None and not self._stopping.is_set():
            self._make_room(self._wanted(now), now)
            self._count_peers()

    def _run(self) -> None:
        is_ill = False
        while not self._stopping.is_set():
            self._woken.clear()
            try:
                self.run_once(time.monotonic())
                is_ill = False
            except Unavailable as error:
                if not is_ill:
                    logger.warning("%s; waiting for it", error)
                is_ill = True
            except JobsError as error:
                self.failure = str(error)
            if self.failure is not None:
                logger.error("the worker stops: %s", self.failure)
                return
            self._woken.wait(TICK_S)

    def _wanted(self, now: float) -> list[CatalogEntry]:
        """The models that jobs wait for and that are not loaded, those that wait longest first."""
        names = set(self._store.claims.wanted_models())
        wanted = [
            entry
            for entry in self._catalog.entries()
            if entry not in self._hosts
            and any((entry.name, dtype) in names for dtype in entry.accepts)
            and self._store.claims.has_work(self._catalog.offer(entry))
        ]
        self._wanted_since = {entry: self._wanted_since.get(entry, now) for entry in wanted}
        return sorted(wanted, key=lambda entry: self._wanted_since[entry])

    def _count_peers(self) -> None:
        others = [
            worker
            for worker in self._store.workers.load_all()
            if worker.state in ("busy", "idle") and worker.worker_id != self.worker_id
        ]
        for entry, host in self._hosts.items():
            offers = (entry.name, entry.fingerprint)
            host.set_num_peers(
                sum(offers in {(m.name, m.fingerprint) for m in worker.models} for worker in others)
            )

    def _make_room(self, wanted: Sequence[CatalogEntry], now: float) -> None:
        for entry in wanted:
            if len(self._hosts) < self._max_models:
                logger.info("loading model %s (%s)", entry.name, entry.dtype)
                self._hosts[entry] = ModelHost(self._store, self._catalog, entry, self.owner, self._options)
                continue
            idle = [e for e, since in self._idle_since.items() if e in self._hosts and now - since >= IDLE_S]
            if not idle and now - self._wanted_since[entry] >= PATIENCE_S:
                idle = list(self._hosts)[:1]  # the one that has been loaded for longest
            if idle:
                logger.info("model %s makes room for %s", idle[0].name, entry.name)
                self._hosts[idle[0]].drain()
            return
