"""The errors of jobs/.

JobsError
├── RefusedError          the order can't be carried out as it stands; nothing was written (exit 2)
├── SourceError           an input changed or became unreadable after planning (the shard fails)
│   └── SourceUnavailable
├── OutputError           the output can't be written: disk full, permission lost (exit 1, resumable)
│   └── OutputUnavailable
├── StoreError            the job database refused or lacks something (exit 1)
│   ├── JobIsLive         another process holds the job
│   └── StoreUnavailable
└── Unavailable           base of the three: a service does not answer now; the same call may work later
"""

from __future__ import annotations


class JobsError(Exception):
    """Root of everything jobs/ raises on purpose; the text is one line and says what to do."""


class Unavailable(JobsError):
    """A service (database, object store) that does not answer at present: wait, and try again."""


class RefusedError(JobsError):
    """An order that is refused before any work: no such file, unknown column, bad option."""


class SourceError(JobsError):
    """An input that could be read at planning and can't be read now."""


class SourceUnavailable(SourceError, Unavailable):
    """An input whose place does not answer now."""


class OutputError(JobsError):
    """An output that can't be written."""


class OutputUnavailable(OutputError, Unavailable):
    """An output place that does not answer now."""


class StoreError(JobsError):
    """The job database can't do what was asked."""


class StoreUnavailable(StoreError, Unavailable):
    """A job database that does not answer now: restarted, cut off, locked."""


class JobIsLive(StoreError):
    """Another process holds this job; `owner` says which."""

    def __init__(self, job_id: str, owner: str) -> None:
        super().__init__(f"job {job_id} is being run by {owner}; wait for it or stop it first")
        self.job_id = job_id
        self.owner = owner
