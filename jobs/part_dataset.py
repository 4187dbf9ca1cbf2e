"""A job's committed parts as one Arrow dataset, wherever they lie; nothing is read before the dataset is asked.

Arrow has an S3 client of its own, with settings of its own. Here it reads through our storage, so that one set of
endpoint settings holds for writing and reading.
"""

from __future__ import annotations

from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from jobs.part_schema import load_part_schema
from jobs.records import JobRecord, PartFile
from jobs.states import JobState
from jobs.storage import Storage, open_storage
from jobs.store import Store

_FORMATS = {"parquet": "parquet", "jsonl": "json"}


def load_dataset(store: Store, job: JobRecord) -> ds.Dataset:
    """The rows that are committed by now, completions and errors; of a job that runs there will be more."""
    storage = open_storage(job.output)
    schema = load_part_schema(job.part_schema) if job.part_schema else pa.schema([])
    is_settled = job.state is JobState.COMPLETED
    parts = [committed.part for committed in store.committed_parts(job.job_id)]
    names = [part.path if is_settled else _find(storage, part) for part in parts if part.bytes]
    if not names:
        return ds.dataset(schema.empty_table())
    kind = _FORMATS[str(job.spec.get("output_format") or "parquet")]
    return ds.dataset(sorted(names), schema=schema, format=kind, filesystem=_build_files(storage))


def _find(storage: Storage, part: PartFile) -> str:
    """Where the part's bytes are: under its own name, or still under that of its attempt."""
    is_published = storage.holds(part.path, part.attempt, part.bytes)
    return part.path if is_published or storage.size(part.attempt) is None else part.attempt


def _build_files(storage: Storage) -> pafs.FileSystem:
    """Local files are Arrow's own business: it closes what it opens there."""
    if "://" in storage.root:
        return pafs.PyFileSystem(StorageFiles(storage))
    return pafs.SubTreeFileSystem(storage.root, pafs.LocalFileSystem())


class StorageFiles(pafs.FileSystemHandler):  # type: ignore[misc]
    """A Storage as Arrow sees file systems; for reading files whose names are known."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageFiles) and other._storage.root == self._storage.root

    def __hash__(self) -> int:
        return hash(self._storage.root)

    def get_type_name(self) -> str:
        """The name in messages."""
        return "gristmill"

    def normalize_path(self, path: str) -> str:
        """Names are normal as they are."""
        return path

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        """Sizes, or that a file is not there."""
        sizes = [(path, self._storage.size(path)) for path in paths]
        return [
            pafs.FileInfo(path, pafs.FileType.NotFound)
            if size is None
            else pafs.FileInfo(path, pafs.FileType.File, size=size)
            for path, size in sizes
        ]

    def open_input_file(self, path: str) -> pa.NativeFile:
        """A seekable reader."""
        return pa.PythonFile(self._storage.open(path), mode="r")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        """A reader from the beginning."""
        return self.open_input_file(path)

    def get_file_info_selector(self, selector: Any) -> NoReturn:
        """Not for listing."""
        raise _unsupported("listed")

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise _unsupported("written")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refuse
    move = copy_file = open_output_stream = open_append_stream = _refuse


def _unsupported(verb: str) -> NotImplementedError:
    return NotImplementedError(f"a job's output can't be {verb} through its dataset: use the output folder")
