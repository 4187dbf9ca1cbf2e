"""A job in this process: what `gristmill run` does, as a function that prints nothing."""

from __future__ import annotations

import logging
import sys
from typing import Unpack

from gristmill.jobs.fields import JobFields
from gristmill.jobs.records import JobStatus
from gristmill.jobs.spec import parse_spec
from gristmill.worker.local.run import run_job
from gristmill.worker.show.progress import LogDisplay, build_display


def run(
    *, database_url: str | None = None, show_progress: bool = False, **fields: Unpack[JobFields]
) -> JobStatus:
    """Runs a job of these fields of JobSpec in this process, or goes on with it if it is the same one; how it ended.

    Prints nothing, but its progress to stderr if asked. Raises RefusedError before anything is written,
    KeyboardInterrupt when it was stopped: finished rows are committed, the same call goes on.
    """
    display = build_display(sys.stderr) if show_progress else LogDisplay(logging.INFO)
    return run_job(parse_spec(fields), database_url, display)
