"""What an output folder may show: committed parts under their names, and nobody else's files.

Publishing can be repeated; the database hears of it afterwards: a crash between is redone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Literal, get_args

from gristmill.jobs.crash_points import reach
from gristmill.jobs.errors import RefusedError
from gristmill.jobs.formats import OutputFormatName
from gristmill.jobs.output.parts import ATTEMPTS_FOLDER, settle_part
from gristmill.jobs.records import JobRecord, PartFile
from gristmill.jobs.regroup.spool import delete_spools
from gristmill.jobs.storage.folder import Storage
from gristmill.jobs.store.shards import Shards

MANIFEST_NAME = "_manifest.json"
_PART_NAME = re.compile(rf"part-\d{{5,}}\.({'|'.join(get_args(OutputFormatName))})")


def publish_part(storage: Storage, shards: Shards, shard_id: int, part: PartFile) -> None:
    """Gives a committed attempt its part name, and tells the database."""
    reach("publish.before")
    settle_part(storage, part)
    reach("publish.after")
    shards.mark_published(shard_id, part)
    reach("mark.after")


def redo_publications(storage: Storage, shards: Shards, job_id: str) -> int:
    """Publishes what was committed and not yet reported as published; returns how many parts that were.

    Removes parts of an earlier job first. Only for who holds the job.
    """
    remove_strays(storage, shards, job_id)
    unpublished = shards.unpublished_parts(job_id)
    for shard_id, part, _ in unpublished:
        publish_part(storage, shards, shard_id, part)
    return len(unpublished)


def remove_strays(
    storage: Storage, shards: Shards, job_id: str, is_ours: Callable[[], bool] = lambda: True
) -> None:
    """Removes parts of an earlier job, left by a crash before clear_output.

    `is_ours` is asked after the listing: what a later owner of the folder puts there is not in it.
    """
    present = {name for name in storage.names() if _PART_NAME.fullmatch(name)}
    if not is_ours():
        return
    # Read after the listing: a part that another worker published before it is among these.
    committed = {entry.part.path for entry in shards.committed_parts(job_id)}
    if strays := sorted(present - committed):
        storage.delete(MANIFEST_NAME)  # the earlier job's as well
        storage.delete_all(strays)


def list_attempts(storage: Storage) -> list[str]:
    """Every file among the attempts, those too that were never finished."""
    return [f"{ATTEMPTS_FOLDER}/{name}" for name in storage.names(ATTEMPTS_FOLDER)]


def sweep_attempts(storage: Storage) -> None:
    """Removes all attempts and half files. Only when no shard of the job runs, and its parts are settled."""
    storage.delete_all(list_attempts(storage))
    storage.delete(ATTEMPTS_FOLDER)
    storage.sweep()


def check_output(
    storage: Storage,
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
    storage.check_writable()
    for uri in input_uris:
        if uri.startswith(f"{root.rstrip('/')}/"):
            raise RefusedError(f"the input {uri} lies in the output folder {root}: choose another --output")
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


def clear_output(storage: Storage, spare_spool: int | None = None) -> None:
    """Removes our own files of an earlier job, and nothing else; the manifest goes first, parts last: without
    its attempt no late publisher brings one back. `spare_spool`: the new job's.
    """
    storage.delete(MANIFEST_NAME)
    delete_spools(storage, spare_spool)
    sweep_attempts(storage)
    storage.delete_all([name for name in storage.names() if _PART_NAME.fullmatch(name)])


def is_own_name(name: str) -> bool:
    """Whether gristmill gives such a name to a file of an output folder."""
    return bool(_PART_NAME.fullmatch(name)) or name in (ATTEMPTS_FOLDER, MANIFEST_NAME)


def _is_under_way(job: JobRecord | None, identity: str) -> bool:
    """Whether the job of an empty folder can go on: one that lost its committed parts starts anew."""
    return job is not None and job.identity == identity and job.rows_committed == 0
