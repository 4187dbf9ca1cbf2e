"""The end of a job: every part in its place and counted, the manifest written, then the state.

Claimed like a shard, and every step can be done again: a process that dies here leaves the rest to the next.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from jobs.errors import OutputError
from jobs.owner import Owner
from jobs.parts import count_part
from jobs.publishing import MANIFEST_NAME, redo_publications, sweep_attempts
from jobs.records import CommittedPart, FinalizeClaim, JobRecord, JobStatus
from jobs.states import JobState
from jobs.storage import LocalStorage
from jobs.store import Store

MANIFEST_VERSION = 1
_RENEW_EVERY_PARTS = 50
# What changes after the job's last row, or says nothing once it is completed.
_NOT_IN_MANIFEST = (
    "state",
    "message",
    "owner",
    "eta_s",
    "rows_done",
    "fingerprint",
    "model",
    "job_id",
    "output",
)


def finalize_job(store: Store, storage: LocalStorage, job_id: str, owner: Owner) -> JobState:
    """Ends a job whose shards are all done or failed; returns its state, unchanged when it is not time yet.

    Raises OutputError when a part is missing or not what was committed: the job waits for the next try.
    """
    claim = store.claim_finalize(job_id, owner)
    if claim is not None:
        redo_publications(storage, store, job_id)
        failure = store.failed_shard_message(job_id)
        if failure is None:
            _write_manifest(store, storage, claim)
            store.complete_job(claim, JobState.COMPLETED)
        else:
            sweep_attempts(storage)
            store.complete_job(claim, JobState.FAILED, failure)
    return store.load_job(job_id).state


def build_manifest(job: JobRecord, status: JobStatus, parts: list[CommittedPart]) -> bytes:
    """The manifest's bytes: only what the database says, in a fixed order: all writers write the same."""
    figures: dict[str, Any] = {k: v for k, v in asdict(status).items() if k not in _NOT_IN_MANIFEST}
    content = {
        "manifest_version": MANIFEST_VERSION,
        "job_id": job.job_id,
        "identity": job.identity,
        "model": job.model,
        "model_fingerprint": job.fingerprint,
        "spec": job.spec,
        "sources": [asdict(source) for source in job.sources],
        "parts": [
            {"path": part.path, "rows": part.rows, "bytes": part.bytes, "sha256": part.sha256}
            for _, part, _ in parts
        ],
        "totals": {
            "rows": status.rows,
            "completions": status.completed + status.skipped,
            "errors": status.failed,
            "not_run": status.not_run,
        },
        "job": figures,
    }
    return (json.dumps(content, sort_keys=True, indent=2, ensure_ascii=False) + "\n").encode()


def _write_manifest(store: Store, storage: LocalStorage, claim: FinalizeClaim) -> None:
    job, status, parts = (
        store.load_job(claim.job_id),
        store.status(claim.job_id),
        store.committed_parts(claim.job_id),
    )
    rows = errors = 0
    for number, committed in enumerate(parts, start=1):
        found = count_part(storage, committed.part)
        expected = (committed.part.rows, committed.rows_failed)
        if found != expected:
            raise OutputError(
                f"{storage.path(committed.part.path)} holds {found.rows} rows and {found.errors} errors, "
                f"but {expected[0]} and {expected[1]} were committed: start over with --if-exists overwrite"
            )
        rows, errors = rows + found.rows, errors + found.errors
        if number % _RENEW_EVERY_PARTS == 0:
            store.renew_finalize(claim)
    completions = status.completed + status.skipped
    assert status.not_run == 0 and rows == status.rows, f"{rows} rows in the parts of a job of {status.rows}"
    assert (rows, errors) == (completions + status.failed, status.failed), (
        "rows = completions + errors + not_run"
    )
    sweep_attempts(storage)
    storage.put(MANIFEST_NAME, build_manifest(job, status, parts))
