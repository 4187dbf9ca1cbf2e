"""Gristmill grinds a file of prompts into a file of completions: an offline LLM batch inference worker.

`run` does a job in this process. `submit` hands one to the queue's workers; `status`, `wait`, `cancel`, `resume`,
`retry`, `list_jobs`, `workers` and `results` are about those. Names are looked up when they are first used: importing
a part of Gristmill loads nothing that it does not need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gristmill.engine.errors import EngineError
    from gristmill.jobs.client import (
        cancel,
        list_jobs,
        results,
        resume,
        retry,
        status,
        submit,
        wait,
        workers,
    )
    from gristmill.jobs.errors import JobsError, RefusedError, Unavailable
    from gristmill.jobs.records import JobStatus
    from gristmill.jobs.spec import JobSpec
    from gristmill.running import run

_PLACES = {
    "gristmill.running": ("run",),
    "gristmill.jobs.client": (
        *("submit", "status", "wait", "cancel", "resume", "retry", "list_jobs", "workers", "results"),
    ),
    "gristmill.jobs.spec": ("JobSpec",),
    "gristmill.jobs.records": ("JobStatus",),
    "gristmill.jobs.errors": ("JobsError", "RefusedError", "Unavailable"),
    "gristmill.engine.errors": ("EngineError",),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "EngineError",
    "JobSpec",
    "JobStatus",
    "JobsError",
    "RefusedError",
    "Unavailable",
    "cancel",
    "list_jobs",
    "results",
    "resume",
    "retry",
    "run",
    "status",
    "submit",
    "wait",
    "workers",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'gristmill' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
