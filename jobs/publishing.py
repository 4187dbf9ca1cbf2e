"""What an output folder may show: committed parts under their names, and nobody else's files.

Publishing is a rename that can be repeated; the database hears of it afterwards: a crash between is redone.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from jobs.errors import RefusedError
from jobs.parts import ATTEMPTS_FOLDER, settle_part
from jobs.records import JobRecord, PartFile
from jobs.storage import TEMPORARY_SUFFIX, LocalStorage
from jobs.store import Store

MANIFEST_NAME = "_manifest.json"
_PART_NAME = re.compile(r"part-\d{5,}\.(parquet|jsonl)")


def publish_part(storage: LocalStorage, store: Store, shard_id: int, part: PartFile) -> None:
    """Gives a committed attempt its part name, and tells the database."""
    settle_part(storage, part)
    store.mark_published(shard_id, part)


def redo_publications(storage: LocalStorage, store: Store, job_id: str) -> int:
    """Publishes what was committed and not yet reported as published; returns how many parts that were.

    Removes parts of an earlier job, left by a crash after create_job and before clear_output.
    """
    present = {name for name in storage.names() if _PART_NAME.fullmatch(name)}
    # Read after the listing: a part that another worker published before it is among these.
    committed = {entry.part.path for entry in store.committed_parts(job_id)}
    if strays := sorted(present - committed):
        storage.delete(MANIFEST_NAME)  # the earlier job's as well
        for name in strays:
            storage.delete(name)
    unpublished = store.unpublished_parts(job_id)
    for shard_id, part, _ in unpublished:
        publish_part(storage, store, shard_id, part)
    return len(unpublished)


def sweep_attempts(storage: LocalStorage) -> None:
    """Removes attempts that nobody committed, and temporary files. Only when no shard of the job runs."""
    for name in storage.names(ATTEMPTS_FOLDER):
        storage.delete(f"{ATTEMPTS_FOLDER}/{name}")
    storage.delete(ATTEMPTS_FOLDER)
    for name in storage.names():
        if name.startswith(".") and name.endswith(TEMPORARY_SUFFIX):
            storage.delete(name)


def check_output(
    storage: LocalStorage,
    job: JobRecord | None,
    identity: str,
    if_exists: str,
    input_uris: Collection[str] = (),
) -> Literal["new", "resume"]:
    """Whether a run may write here, and whether it goes on with `job` (this folder's last) or is a new one.

    Changes nothing. Raises RefusedError for a folder with other files, that of another job, or one that can't
    be written.
    """
    root = storage.root
    _check_place(root, input_uris)
    _check_access(root)
    names = [name for name in storage.names() if not name.startswith(".")]
    ours = [name for name in names if is_own_name(name)]
    others = [name for name in names if name not in ours and not name.startswith("_")]
    if others:
        raise RefusedError(
            f"{root} holds files not written by gristmill ({', '.join(others[:3])}): choose another --output"
        )
    if if_exists == "overwrite":
        return "new"
    if not ours:
        return "resume" if _is_under_way(job, identity) else "new"
    if if_exists == "fail":
        raise RefusedError(
            f"{root} holds the output of a job: choose another --output, or leave --if-exists fail out"
        )
    if job is None or job.identity != identity:
        holder = f"job {job.job_id}" if job else "a job that this database does not know"
        raise RefusedError(
            f"{root} holds the output of {holder}, with other input, options or model: "
            "choose another --output, or replace it with --if-exists overwrite"
        )
    return "resume"


def clear_output(storage: LocalStorage) -> None:
    """Removes our own files of an earlier job, and nothing else; the manifest goes first."""
    storage.delete(MANIFEST_NAME)
    for name in storage.names():
        if _PART_NAME.fullmatch(name):
            storage.delete(name)
    sweep_attempts(storage)


def is_own_name(name: str) -> bool:
    """Whether gristmill gives such a name to a file of an output folder."""
    return bool(_PART_NAME.fullmatch(name)) or name in (ATTEMPTS_FOLDER, MANIFEST_NAME)


def _is_under_way(job: JobRecord | None, identity: str) -> bool:
    """Whether the job of an empty folder can go on: one that lost its committed parts starts anew."""
    return job is not None and job.identity == identity and job.rows_committed == 0


def _check_place(root: Path, input_uris: Collection[str]) -> None:
    if root.exists() and not root.is_dir():
        raise RefusedError(f"--output {root} is a file: name a folder")
    for uri in input_uris:
        if Path(uri).is_relative_to(root):
            raise RefusedError(f"the input {uri} lies in the output folder {root}: choose another --output")


def _check_access(root: Path) -> None:
    """Reads the folder, writes a file where the output will go, and takes it back."""
    existing = next(folder for folder in (root, *root.parents) if os.path.lexists(folder))
    try:
        os.listdir(existing)
        with tempfile.TemporaryFile(dir=existing, prefix=".gristmill-"):
            pass
    except OSError as error:
        raise RefusedError(
            f"--output {root} can't be written ({error.strerror}): name another, or change its permissions"
        ) from error
