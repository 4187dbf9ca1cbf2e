"""`gristmill worker` as its tests start it: everything is real but the pool, which only says what is asked of it.

FAKE_STOP_S: how long its stop takes. FAKE_FAILURE: why its host is ill, a moment after the start.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import types
from typing import Any

from gristmill.jobs.owner import current_owner


class FakePool:
    """The pool's interface."""

    def __init__(self, store: Any, catalog: Any, options: Any, **others: Any) -> None:
        self.owner = current_owner()
        self.worker_id = "worker_fake"
        self.allow = tuple(options.allow)
        self.failure: str | None = None

    def start(self) -> None:
        print("pool: start", flush=True)
        if "FAKE_FAILURE" in os.environ:
            threading.Timer(0.2, self._fail).start()

    def wake(self, model: str | None = None) -> None:
        print(f"pool: wake {model}", flush=True)

    def stop(self, timeout_s: float = 10.0) -> bool:
        print(f"pool: stop {timeout_s:g}", flush=True)
        time.sleep(float(os.environ.get("FAKE_STOP_S", "0")))
        print("pool: stopped", flush=True)
        return True

    def _fail(self) -> None:
        self.failure = os.environ["FAKE_FAILURE"]


if __name__ == "__main__":
    module: Any = types.ModuleType("gristmill.worker.serve.model_pool")
    module.ModelPool = FakePool
    sys.modules["gristmill.worker.serve.model_pool"] = module
    from gristmill.worker.cli.main import run_cli

    sys.exit(run_cli(["worker", *sys.argv[1:]]))
