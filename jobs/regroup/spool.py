"""The spool of a regrouped job: its rows in another order, in files below the output folder.

A shard of it names its file by a source_index below 0. A spool has an id of its own, so that a planner which was
taken for dead can't write into another one's. Once the job has completed only its failed rows are kept, shard by
shard, for a retry; nothing is kept where there are none.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

from gristmill.jobs.crash_points import reach
from gristmill.jobs.errors import SourceError
from gristmill.jobs.input.files import expect_ranges
from gristmill.jobs.regroup.external_sort import SortItem
from gristmill.jobs.regroup.prefix_sharing import common_prefix_size
from gristmill.jobs.regroup.records import DamagedRecordError, iterate_records, to_record
from gristmill.jobs.rows import Row
from gristmill.jobs.source import Plan, ShardRange
from gristmill.jobs.storage.folder import Storage

SPOOL_FOLDER = "_spool"
FILE_BYTES = 256 << 20
MAX_BATCH_ROWS = 512
_FILE_BITS = 20
_ID_BITS = 40
_READ_BYTES = 1 << 20
_SLACK = 8  # a shard may be longer or shorter by this fraction of it


class Spooled(NamedTuple):
    """A finished spool: its shards, and how much of its text each row shares with the one before."""

    plan: Plan
    num_shared_bytes: int
    num_bytes: int


def new_spool_id() -> int:
    """An id that no other spool has."""
    return secrets.randbits(_ID_BITS)


def is_spooled(shard: ShardRange) -> bool:
    """Whether the shard's rows lie in a spool."""
    return shard.source_index < 0


def is_spool_of(shard: ShardRange, spool_id: int) -> bool:
    """Whether the shard's rows lie in this spool."""
    return is_spooled(shard) and _spool_and_file(shard.source_index)[0] == spool_id


def list_spool(storage: Storage) -> list[str]:
    """Every file of any spool of the folder, those too that were never finished."""
    return [f"{SPOOL_FOLDER}/{name}" for name in storage.names(SPOOL_FOLDER)]


def delete_spools(storage: Storage, spare: int | None = None) -> None:
    """Removes all spools of the folder but one."""
    kept = "" if spare is None else f"{SPOOL_FOLDER}/{spare:010x}-"
    names = [name for name in list_spool(storage) if not kept or not name.startswith(kept)]
    if names:
        storage.delete_all(names)
        storage.delete(SPOOL_FOLDER)


def delete_spool(storage: Storage, spool_id: int) -> None:
    """Removes the files of one spool."""
    prefix = f"{SPOOL_FOLDER}/{spool_id:010x}-"
    storage.delete_all([name for name in list_spool(storage) if name.startswith(prefix)])
    storage.delete(SPOOL_FOLDER)


def write_spool(
    storage: Storage,
    spool_id: int,
    items: Iterable[SortItem],
    shard_rows: int,
    *,
    is_exact: bool,
    file_bytes: int = FILE_BYTES,
) -> Spooled:
    """Writes the sorted items, in files of about `file_bytes`, and cuts them into shards of about `shard_rows`.

    Unless `is_exact`, a shard ends where its last row shares least with the next one, within an eighth of its
    size: a prefix that lies in two shards may be computed twice.
    """
    cutter = _ShardBoundaries(shard_rows, is_exact)
    last_key = b""
    num_shared = num_bytes = 0
    with ExitStack() as stack:
        file, file_index = None, -1
        for item in items:
            if file is None or file.size >= file_bytes:
                cutter.end_file()
                stack.close()
                file_index += 1
                source_index = _source_index(spool_id, file_index)
                cutter.begin_file(source_index)
                file = stack.enter_context(storage.create(spool_name(source_index)))
                reach("spool.inside")
            shared = common_prefix_size(last_key, item.key)
            cutter.add(len(item.record), shared)
            file.write(item.record)
            num_shared, num_bytes, last_key = num_shared + shared, num_bytes + len(item.key), item.key
        cutter.end_file()
    reach("spool.after")
    shards = tuple(cutter.shards)
    return Spooled(Plan(shards, sum(shard.num_rows for shard in shards)), num_shared, num_bytes)


def load_spool_rows(storage: Storage, shard: ShardRange) -> Iterator[list[Row]]:
    """The rows of a shard in the spool's order, in batches; of a job that has completed its failed rows.

    SourceError when they are not there or damaged.
    """
    num_rows = 0
    try:
        with _open_shard(storage, shard) as file:
            for rows in _batch(iterate_records(file)):
                num_rows += len(rows)
                yield rows
            is_short = file.is_part_of_spool and num_rows < shard.num_rows
    except FileNotFoundError:
        raise SourceError(
            f"{_place(storage, shard)} is gone: start over with --if-exists overwrite"
        ) from None
    except (DamagedRecordError, OSError) as error:
        raise _damaged(storage, shard) from error
    if is_short:
        raise _damaged(storage, shard)


def keep_failed_rows(storage: Storage, shard: ShardRange, failed: Collection[tuple[int, int]]) -> None:
    """Writes the failed rows (source_index, row_index) of a shard to a file of their own, for a retry.

    Nothing happens where the spool is gone: an earlier end of the job left that file.
    """
    if storage.size(spool_name(shard.source_index)) is None:
        return
    num_rows = 0
    with storage.create(_failed_name(shard)) as file:
        for rows in load_spool_rows(storage, shard):
            for row in rows:
                if (row.source_index, row.row_index) in failed:
                    file.write(to_record(row, row.values or ()))
                    num_rows += 1
    assert num_rows == len(failed), f"{num_rows} of {len(failed)} failed rows are in the spool"


def needed_after_end(shards: Iterable[ShardRange]) -> set[str]:
    """The files that hold the failed rows of these shards."""
    return {_failed_name(shard) for shard in shards}


def spool_name(source_index: int) -> str:
    """The file of a shard with this source_index."""
    spool_id, file_index = _spool_and_file(source_index)
    return f"{SPOOL_FOLDER}/{spool_id:010x}-{file_index:05d}"


class _ShardBoundaries:
    """Finds, while the rows go by, where shards end: near the wanted size, where rows share least."""

    def __init__(self, shard_rows: int, is_exact: bool) -> None:
        slack_rows = 0 if is_exact else shard_rows // _SLACK
        self.shards: list[ShardRange] = []
        self._min_rows = max(1, shard_rows - slack_rows)
        self._max_rows = shard_rows + slack_rows
        self._source_index = 0
        self._num_rows = 0  # all rows so far
        self._ends: list[int] = []  # of the open rows, in the file; [0] is where the first one begins
        self._shared: list[int] = []  # what each open row shares with the one before

    def begin_file(self, source_index: int) -> None:
        """The rows that follow are in this file, from its start."""
        self._source_index = source_index
        self._ends = [0]

    def add(self, num_bytes: int, num_shared: int) -> None:
        """The next row."""
        self._ends.append(self._ends[-1] + num_bytes)
        self._shared.append(num_shared)
        if len(self._shared) > self._max_rows:
            self._cut(self._find_border())

    def end_file(self) -> None:
        """What is open becomes a shard."""
        if self._shared:
            self._cut(len(self._shared))

    def _find_border(self) -> int:
        """How many open rows the shard gets: the border before the row that shares least."""
        candidates = range(self._min_rows, self._max_rows + 1)
        return min(candidates, key=lambda index: (self._shared[index], -index))

    def _cut(self, num_rows: int) -> None:
        begin, end = self._ends[0], self._ends[num_rows]
        self.shards.append(
            ShardRange(
                len(self.shards), self._source_index, self._num_rows, num_rows, num_rows, begin, end - begin
            )
        )
        self._num_rows += num_rows
        self._ends = self._ends[num_rows:]
        self._shared = self._shared[num_rows:]


class _ShardFile(io.BufferedReader):
    """The bytes of one shard."""

    is_part_of_spool = True  # False: only the rows that failed


class _Limited(io.RawIOBase):
    """The next `size` bytes of a file, which it closes."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        super().__init__()
        self._file = file
        self._size = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self._file.read(min(memoryview(buffer).nbytes, self._size))
        memoryview(buffer).cast("B")[: len(data)] = data
        self._size -= len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _open_shard(storage: Storage, shard: ShardRange) -> _ShardFile:
    """Raises FileNotFoundError."""
    try:
        file = storage.open(spool_name(shard.source_index))
    except FileNotFoundError:
        name = _failed_name(shard)
        failed = _ShardFile(_Limited(storage.open(name), storage.size(name) or 0), _READ_BYTES)
        failed.is_part_of_spool = False
        return failed
    end = shard.byte_offset + shard.byte_size
    if isinstance(file, io.RawIOBase):
        expect_ranges(file, [(shard.byte_offset, end)])
    file.seek(shard.byte_offset)
    return _ShardFile(_Limited(file, shard.byte_size), _READ_BYTES)


def _batch(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Lists of rows; their bytes are bounded by what one reader holds and MAX_BATCH_ROWS."""
    left = iter(rows)
    while batch := list(islice(left, MAX_BATCH_ROWS)):
        yield batch


def _source_index(spool_id: int, file_index: int) -> int:
    assert file_index < 1 << _FILE_BITS, f"{file_index} files in a spool"
    return -1 - (spool_id << _FILE_BITS | file_index)


def _spool_and_file(source_index: int) -> tuple[int, int]:
    number = -1 - source_index
    return number >> _FILE_BITS, number & (1 << _FILE_BITS) - 1


def _failed_name(shard: ShardRange) -> str:
    spool_id, _ = _spool_and_file(shard.source_index)
    return f"{SPOOL_FOLDER}/{spool_id:010x}-failed-{shard.shard_index:05d}"


def _place(storage: Storage, shard: ShardRange) -> str:
    return storage.place(spool_name(shard.source_index))


def _damaged(storage: Storage, shard: ShardRange) -> SourceError:
    return SourceError(
        f"{_place(storage, shard)} is not as it was written: start over with --if-exists overwrite"
    )
