"""One model in one engine process, and the thread that takes the shards of all its jobs through it.

It keeps the model warm while there is nothing to do. It ends when it is told to, or when the engine can't be
kept alive: then `failure` says why.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from gristmill.engine.config import EngineOptions
from gristmill.engine.errors import EngineError
from gristmill.engine.request import EngineInfo
from gristmill.engine.text.tokenizer import load_tokenizer
from gristmill.jobs.errors import JobsError
from gristmill.jobs.owner import Owner
from gristmill.jobs.store.store import Store
from gristmill.worker.engine.client import EngineClient
from gristmill.worker.engine.credit_window import credit_window
from gristmill.worker.engine.supervisor import ENGINE_TIMEOUT_S, EngineSupervisor, load_model
from gristmill.worker.run.job_context import ContextLoader, Contexts
from gristmill.worker.run.outcome import RunEnd, RunnerOptions
from gristmill.worker.run.shard_runner import ShardRunner
from gristmill.worker.run.shard_source import ShardSource
from gristmill.worker.serve.catalog import Catalog, CatalogEntry
from gristmill.worker.show.progress import LogDisplay

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostOptions:
    """What all hosts of a worker share."""

    allow: Sequence[str]
    engine_options: EngineOptions
    lease_s: float
    engine_timeout_s: float = ENGINE_TIMEOUT_S


class ModelHost:
    """Started at once; every public method may be called from any thread."""

    def __init__(
        self, store: Store, catalog: Catalog, entry: CatalogEntry, owner: Owner, options: HostOptions
    ) -> None:
        self.entry = entry
        self.failure: str | None = None  # why it ended, where nobody asked for it
        self.is_loaded = False
        self._store = store
        self._catalog = catalog
        self._owner = owner
        self._options = options
        self._stop = threading.Event()
        self._contexts: Contexts | None = None
        self._shards = ShardSource(store.claims, catalog.offer(entry), owner, self._prefix_keys)
        self._engine: EngineSupervisor | None = None
        self._runner: ShardRunner | None = None
        self._thread = threading.Thread(target=self._run, name=f"host-{entry.name}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_shards(self) -> int:
        return self._runner.num_shards if self._runner is not None else 0

    @property
    def num_rows_in_flight(self) -> int:
        return self._engine.num_in_flight if self._engine is not None else 0

    def set_num_peers(self, num_peers: int) -> None:
        """How many other workers offer this model."""
        self._shards.num_peers = num_peers

    def wake(self) -> None:
        """There may be a shard for this model."""
        self._shards.look_again()

    def drain(self) -> None:
        """Claims no further shard, and ends when those at hand are done."""
        self._shards.drain()

    def stop(self) -> None:
        """Ends at once: finished rows are committed, the others go back to the queue."""
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end; False when it has not come by then."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        model = self._catalog.path(self.entry.name)
        client = EngineClient(model, replace(self._options.engine_options, dtype=self.entry.dtype))
        try:
            self._catalog.check_unchanged(self.entry)
            client.start()
            info = load_model(client, self._stop.is_set, logger.warning)
            self.is_loaded = True
            logger.info("model %s is loaded (%.1f s)", self.entry.name, info.load_s)
            self._runner = self._build_runner(client, model, info)
            outcome = self._runner.run()
            if outcome.end is RunEnd.ENGINE_FAILED:
                self.failure = f"model {self.entry.name}: {outcome.message}"
        except (JobsError, EngineError) as error:
            if not self._stop.is_set():
                self.failure = f"model {self.entry.name}: {error}"
        except Exception as error:  # the thread's border
            logger.exception("the host of model %s failed", self.entry.name)
            self.failure = f"model {self.entry.name}: internal error, {type(error).__name__}: {error}"
        finally:
            client.kill()

    def _build_runner(self, client: EngineClient, model: str, info: EngineInfo) -> ShardRunner:
        options = self._options
        loader = ContextLoader(self._store.jobs, load_tokenizer(model), info, options.allow)
        contexts = self._contexts = Contexts(loader.load)
        self._engine = EngineSupervisor(
            client,
            credit_window(model, info),
            options.engine_timeout_s,
            lambda: self._catalog.check_unchanged(self.entry),
        )
        return ShardRunner(
            self._store,
            self._shards,
            self._engine,
            contexts,
            LogDisplay(),
            self._stop.is_set,
            RunnerOptions(heartbeat_s=options.lease_s / 4, housekeeping_s=min(1.0, options.lease_s / 4)),
        )

    def _prefix_keys(self) -> Collection[str]:
        """Of the jobs whose prompts the engine saw last."""
        return self._contexts.prefix_keys() if self._contexts is not None else ()
