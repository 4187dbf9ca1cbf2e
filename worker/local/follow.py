"""A submitted job, watched from outside: its progress as `run` shows it, its end as `run` reports it."""

from __future__ import annotations

from gristmill.jobs.client import wait_for_job
from gristmill.jobs.records import JobStatus
from gristmill.jobs.states import JobState
from gristmill.jobs.store.store import Store
from gristmill.worker.show.console import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED, print_error, print_out
from gristmill.worker.show.progress import Display
from gristmill.worker.show.report import to_progress, to_status_text


class ProgressFollower:
    """Feeds a display from a job's status, from the moment at which its rows are counted."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._is_started = False

    def update(self, status: JobStatus) -> None:
        """The next status."""
        if not self._is_started and not status.shards:
            return
        if not self._is_started:
            self._is_started = True
            self._display.start(status.rows, status.rows_done, status.job_id)
        self._display.update(to_progress(status))


def follow_job(store: Store, job_id: str, display: Display, poll_s: float = 1.0) -> int:
    """Prints the id, waits for the end and reports it; the exit code of `run`. Ctrl-C leaves the job running."""
    try:
        print_out(job_id)
        try:
            status = wait_for_job(store, job_id, poll_s=poll_s, on_progress=ProgressFollower(display).update)
        finally:
            display.stop()
    except KeyboardInterrupt:
        print_error(
            f"job {job_id} goes on without this command; gristmill status {job_id}, gristmill cancel {job_id}"
        )
        return EXIT_INTERRUPTED
    return report_end(status)


def report_end(status: JobStatus, is_live: bool | None = None) -> int:
    """Prints the final table, and one line on stderr where the job has not completed; the exit code."""
    if status.state == JobState.FAILED and not status.shards:
        print_error(f"job {status.job_id} was refused: {status.message}")
        return EXIT_REFUSED
    print_out(to_status_text(status, is_live))
    if status.state != JobState.COMPLETED:
        reason = f": {status.message}" if status.message else ""
        print_error(
            f"job {status.job_id} is {status.state}{reason}; {status.rows - status.not_run:,} of {status.rows:,}"
            f" rows are done and kept; to go on: gristmill resume {status.job_id}"
        )
        return EXIT_FAILED
    is_all_failed = status.rows > 0 and status.failed == status.rows
    if is_all_failed:
        print_error(
            f"every row of job {status.job_id} failed: the table and the column error_message say why"
        )
    return EXIT_FAILED if is_all_failed else 0
