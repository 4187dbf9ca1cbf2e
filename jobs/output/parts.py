"""The part of a shard: written as an attempt's own file, which counts only once the database says so.

A shard keeps one part for ever, its rows in the order of the input (source, row_index). A later attempt writes a
longer one, the earlier rows and its own; when failed rows are tried again, first a shorter one, without them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import BinaryIO

import pyarrow as pa

from gristmill.jobs.crash_points import reach
from gristmill.jobs.errors import OutputError
from gristmill.jobs.output.formats.base import PartRows
from gristmill.jobs.output.formats.registry import OUTPUT_FORMATS, format_of_part
from gristmill.jobs.records import PartFile, ShardClaim
from gristmill.jobs.results import Result
from gristmill.jobs.source import Source
from gristmill.jobs.stats import JobStats, ShardCounts
from gristmill.jobs.storage.folder import Storage

ATTEMPTS_FOLDER = "_attempts"
_OPEN_TRIES = 4


def part_name(shard_index: int, output_format: str) -> str:
    """The deterministic name of a shard's part."""
    return f"part-{shard_index:05d}.{output_format}"


def write_attempt(
    storage: Storage,
    claim: ShardClaim,
    results: Sequence[Result],
    schema: pa.Schema,
    sources: Sequence[Source],
    output_format: str,
) -> PartFile:
    """Writes `results` (any order) and the rows of claim.part to a new attempt file, synced, not published.

    Raises OutputError when the disk is full or the earlier part is not as committed; then no file is left.
    """
    name = _attempt_name(claim, output_format)
    ordered = sorted(results, key=lambda result: (result.source_index, result.row_index))
    with _open_part(storage, claim.part) if claim.part else nullcontext() as earlier:
        with storage.create(name) as file:
            num_rows = OUTPUT_FORMATS[output_format].write(file, ordered, earlier, schema, sources)
    reach("write.after")
    expected = len(ordered) + (claim.part.rows if claim.part else 0)
    assert num_rows == expected, f"{num_rows} rows written, {expected} expected"
    return PartFile(part_name(claim.range.shard_index, output_format), name, num_rows, file.size, file.sha256)


def strip_errors(
    storage: Storage,
    claim: ShardClaim,
    schema: pa.Schema,
    sources: Sequence[Source],
    output_format: str,
) -> tuple[PartFile, ShardCounts, JobStats]:
    """Writes claim.part without its error rows as a new attempt, for these rows to be computed again.

    The counts and stats are those of the left-out rows, negative: what the commit of this attempt adds.
    """
    assert claim.part is not None, f"shard {claim.shard_id} has no part to strip"
    name = _attempt_name(claim, output_format)
    with _open_part(storage, claim.part) as earlier, storage.create(name) as file:
        stripped = OUTPUT_FORMATS[output_format].strip(file, earlier, schema)
    removed = stripped.errors_by_code
    num_removed = sum(removed.values())
    assert stripped.num_kept + num_removed == claim.part.rows, f"{stripped} of {claim.part.rows} rows"
    part = PartFile(claim.part.path, name, stripped.num_kept, file.size, file.sha256)
    tokens = {column: -count for column, count in stripped.tokens.items()}
    stats = JobStats(errors_by_code={code: -count for code, count in removed.items()})
    return part, ShardCounts(failed=-num_removed, **tokens), stats


def load_done_rows(
    storage: Storage, part: PartFile | None, sources: Sequence[Source], *, only_errors: bool = False
) -> set[tuple[int, int]]:
    """(source_index, row_index) of every row that earlier attempts committed, or of the error rows among them."""
    if part is None:
        return set()
    with _open_part(storage, part) as file, _readable(storage, part):
        found = list(format_of_part(part.path).load_keys(file, only_errors))
    if not found:
        return set()
    index_of = {source.uri: index for index, source in enumerate(sources)}
    try:
        return {(index_of[uri], row_index) for uri, row_index in found}
    except KeyError as error:
        raise OutputError(
            f"{storage.place(part.path)} holds rows of {error}, which is no input of the job: "
            "start over with --if-exists overwrite"
        ) from None


def count_part(storage: Storage, part: PartFile) -> PartRows:
    """Rows and error rows of a part, by its own footer or lines; publishes it first where that was not done."""
    form = format_of_part(part.path)
    if form.has_footer:
        name = settle_part(storage, part)
        with suppress(pa.ArrowException, ValueError, LookupError, OSError), storage.open(name) as file:
            found = form.count(file)
            if found.rows == part.rows:
                return found
    # What was read of a footer may have been damaged on the way: the whole part tells, by its hash.
    with _open_part(storage, part) as file, _readable(storage, part):
        return form.count(file)


def settle_part(storage: Storage, part: PartFile) -> str:
    """Gives a committed attempt its part name, if nobody did so yet; returns that name.

    On local disk the attempt is renamed. Whoever claims a shard settles its part before committing another, so
    no older attempt is left that a paused publisher could rename over it: it finds its file gone. In S3 the
    attempt is copied, and stays until the job ends: such a late copy is replaced by the next one to settle.
    """
    storage.publish(part.attempt, part.path)
    if not storage.holds(part.path, part.attempt, part.bytes):
        size = storage.size(part.path)
        if size is None:
            found = "is missing"
        elif size != part.bytes:
            found = f"has {size} bytes, not the {part.bytes} that were committed"
        else:
            found = "is not what was committed"
        raise OutputError(
            f"{storage.place(part.path)} {found}: put the file back, or start over with --if-exists overwrite"
        )
    return part.path


def _open_part(storage: Storage, part: PartFile) -> BinaryIO:
    """The committed bytes. A late publisher may replace a settled part before it is read: then once more."""
    for _ in range(_OPEN_TRIES):
        name = settle_part(storage, part)
        try:
            return storage.open_checked(name, part.sha256)
        except (FileNotFoundError, ValueError):
            continue
    raise OutputError(
        f"{storage.place(part.path)} holds other bytes than were committed: "
        "put the file back, or start over with --if-exists overwrite"
    )


@contextmanager
def _readable(storage: Storage, part: PartFile) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, ValueError, LookupError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise OutputError(
            f"{storage.place(part.path)} can't be read ({reason}): "
            "put the file back, or start over with --if-exists overwrite"
        ) from error


def _attempt_name(claim: ShardClaim, output_format: str) -> str:
    index = claim.range.shard_index
    return f"{ATTEMPTS_FOLDER}/{index:05d}-{claim.fence}-{uuid.uuid4().hex[:12]}.{output_format}"
