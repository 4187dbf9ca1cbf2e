"""The end of a job: every part in its place and counted, the manifest written, then the state.

Claimed like a shard, and every step can be done again: a process that dies here leaves the rest to the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from gristmill.jobs.crash_points import reach
from gristmill.jobs.errors import OutputError
from gristmill.jobs.output.formats.base import PartRows
from gristmill.jobs.output.parts import ATTEMPTS_FOLDER, count_part, load_done_rows
from gristmill.jobs.output.publishing import MANIFEST_NAME, list_attempts, remove_strays
from gristmill.jobs.owner import Owner
from gristmill.jobs.records import CommittedPart, FinalizeClaim, JobRecord, JobStatus
from gristmill.jobs.regroup.spool import SPOOL_FOLDER, keep_failed_rows, list_spool, needed_after_end
from gristmill.jobs.states import JobState
from gristmill.jobs.storage.folder import Storage
from gristmill.jobs.store.store import Store

MANIFEST_VERSION = 1
COUNT_THREADS = 8
_COUNT_BATCH = 64
_RENEW_EVERY_S = 1.0
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
    "num_workers",
    "is_live",
)


class _ClaimLostError(Exception):
    """Another process finalizes this job now."""


def finalize_job(store: Store, storage: Storage, job_id: str, owner: Owner) -> JobState:
    """Ends a job whose shards are all done or failed; returns its state, unchanged when it is not time yet.

    Raises OutputError when a part is missing or not what was committed: the job waits for the next try.
    """
    claim = store.finalizing.claim(job_id, owner)
    if claim is not None:
        with suppress(_ClaimLostError):
            _end_job(store, storage, claim)
    return store.jobs.load(job_id).state


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


def _end_job(store: Store, storage: Storage, claim: FinalizeClaim) -> None:
    """Settles the folder, then ends the job.

    What is swept is listed before the claim is checked: while that holds, nobody writes, and what a later run
    of the job writes is not in the list. Attempts that don't count go first, so that no paused publisher has
    anything left to put over a part that was found right; those that do count go when all parts are in place.
    """
    reach("finalize.claimed")
    attempts = list_attempts(storage)
    _renew(store, claim)
    remove_strays(storage, store.shards, claim.job_id, lambda: store.finalizing.renew(claim))
    parts = store.shards.committed_parts(claim.job_id)
    committed = {entry.part.attempt for entry in parts}
    storage.delete_all(name for name in attempts if name not in committed)
    num_rows, num_errors = _check_parts(store, storage, claim, parts)
    reach("finalize.checked")
    storage.delete_all(name for name in attempts if name in committed)
    storage.delete(ATTEMPTS_FOLDER)
    storage.sweep()
    failure = store.shards.failure(claim.job_id)
    if failure is not None:
        store.finalizing.complete(claim, JobState.FAILED, failure)
        return
    _settle_spool(store, storage, claim)
    _renew(store, claim)
    job, status = store.jobs.load(claim.job_id), store.jobs.status(claim.job_id)
    completions = status.completed + status.skipped
    assert status.not_run == 0 and num_rows == status.rows, f"{num_rows} rows in a job of {status.rows}"
    assert (num_rows, num_errors) == (completions + status.failed, status.failed), (
        "rows = completions + errors + not_run"
    )
    reach("manifest.before")
    _put_manifest(store, storage, claim, build_manifest(job, status, parts))
    reach("manifest.after")
    store.finalizing.complete(claim, JobState.COMPLETED)
    reach("complete.after")


def _settle_spool(store: Store, storage: Storage, claim: FinalizeClaim) -> None:
    """Of a spool only the failed rows are needed any more: they are kept for a retry, shard by shard.

    What goes is listed before the claim is checked, as in _end_job.
    """
    files = list_spool(storage)
    if not files:
        return
    _renew(store, claim)
    sources = store.jobs.load(claim.job_id).sources
    shards = [shard for shard in store.shards.spooled(claim.job_id) if shard.rows_failed]
    for shard in shards:
        keep_failed_rows(storage, shard.range, load_done_rows(storage, shard.part, sources, only_errors=True))
        _renew(store, claim)
    reach("spool.kept")
    needed = needed_after_end(shard.range for shard in shards)
    storage.delete_all(name for name in files if name not in needed)
    storage.delete(SPOOL_FOLDER)


def _check_parts(
    store: Store, storage: Storage, claim: FinalizeClaim, parts: Sequence[CommittedPart]
) -> PartRows:
    """Publishes what is not published, and counts every part as it lies in the folder; the sums."""
    unpublished = {entry.shard_id for entry in store.shards.unpublished_parts(claim.job_id)}
    rows = errors = 0
    for committed, found in _count_parts(store, storage, claim, parts):
        expected = (committed.part.rows, committed.rows_failed)
        if found != expected:
            raise OutputError(
                f"{storage.place(committed.part.path)} holds {found.rows} rows and {found.errors} errors, "
                f"but {expected[0]} and {expected[1]} were committed: start over with --if-exists overwrite"
            )
        if committed.shard_id in unpublished:
            store.shards.mark_published(committed.shard_id, committed.part)
        rows, errors = rows + found.rows, errors + found.errors
    return PartRows(rows, errors)


def _count_parts(
    store: Store, storage: Storage, claim: FinalizeClaim, parts: Sequence[CommittedPart]
) -> Iterator[tuple[CommittedPart, PartRows]]:
    """Several parts at a time: each takes a few answers of the object store. Keeps the claim meanwhile."""
    pool = ThreadPoolExecutor(COUNT_THREADS, thread_name_prefix="finalize")
    try:
        for start in range(0, len(parts), _COUNT_BATCH):
            batch = parts[start : start + _COUNT_BATCH]
            counts = [pool.submit(count_part, storage, committed.part) for committed in batch]
            while wait(counts, _RENEW_EVERY_S).not_done:
                _renew(store, claim)
            yield from zip(batch, (count.result() for count in counts), strict=True)
            _renew(store, claim)
    finally:
        pool.shutdown(cancel_futures=True)


def _put_manifest(store: Store, storage: Storage, claim: FinalizeClaim, data: bytes) -> None:
    """The manifest, last of all. One of an earlier end of this job (before a retry) makes room for it."""
    if storage.put_new(MANIFEST_NAME, data):
        return
    with suppress(FileNotFoundError, ValueError):
        found = json.loads(storage.read(MANIFEST_NAME))
        if isinstance(found, dict) and found.get("job_id") == claim.job_id:
            _renew(store, claim)
            storage.delete(MANIFEST_NAME)
    if not storage.put_new(MANIFEST_NAME, data):
        raise OutputError(
            f"{storage.place(MANIFEST_NAME)} is that of another job: choose another --output, or remove the file"
        )


def _renew(store: Store, claim: FinalizeClaim) -> None:
    if not store.finalizing.renew(claim):
        raise _ClaimLostError
