"""Regrouping a job by prefix: where a sample shows that sorted rows would save much more prompt text, they are sorted.

Decides, sorts and writes the spool; who may start the job, and when, is the caller's business. Texts are compared,
not tokens: there is no tokenizer here, and four bytes stand for a token.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from gristmill.jobs.errors import JobsError
from gristmill.jobs.input.reading import load_rows
from gristmill.jobs.prompt.source import PromptSource
from gristmill.jobs.regroup.external_sort import ExternalSorter, SortItem
from gristmill.jobs.regroup.prefix_sharing import PrefixSharing, estimate_sharing
from gristmill.jobs.regroup.records import ValueTypeError, to_record
from gristmill.jobs.regroup.sample import load_windows
from gristmill.jobs.regroup.spool import Spooled, delete_spool, new_spool_id, write_spool
from gristmill.jobs.row_errors import RowError, SkipRow
from gristmill.jobs.rows import Row
from gristmill.jobs.source import Plan, Source
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.storage.folder import Storage
from gristmill.jobs.storage.hashing_file import write_error
from gristmill.jobs.storage.local import LocalStorage

MIN_GAIN = 0.10  # of the prompt text
MIN_GAIN_BYTES = 64  # of a prompt: about 16 tokens, less is not worth a pass over the input
MAX_INPUT_BYTES = 20 << 30  # sorting as much takes a quarter of an hour, and twice its space
MAX_WINDOW_BYTES = 8 << 20  # of the prompts of one sampled window
BEAT_EVERY_S = 2.0
_LAST_KEY = b"\xff"  # after every text in UTF-8: rows that make no prompt come last

logger = logging.getLogger(__name__)


class StoppedError(Exception):
    """The caller does not want the spool any more."""


@dataclass(frozen=True, slots=True)
class Regrouping:
    """A job's rows in a spool: the shards of it, and what was found out."""

    plan: Plan
    spool_id: int
    note: str  # for people
    figures: Mapping[str, Any]  # for the job's history


def regroup(
    spec: JobSpec,
    sources: Sequence[Source],
    prompts: PromptSource,
    plan: Plan,
    storage: Storage,
    go_on: Callable[[], bool] = lambda: True,
) -> Regrouping | None:
    """The job's rows sorted by prompt in a spool, or None: they stay as they are.

    `plan`: of the input, as it would be run without. `go_on` is called now and then; False ends it with
    StoppedError. Whatever is raised, no spool is left. Errors are those of reading the input and writing the output.
    """
    if not _is_candidate(spec, sources, plan):
        return None
    beat = _Beat(go_on)
    sharing = None
    if spec.regroup == "auto":
        sharing = _estimate(sources, prompts, plan, beat)
        if sharing.gain < MIN_GAIN or sharing.gain * sharing.prompt_bytes < MIN_GAIN_BYTES:
            logger.info("not regrouped by prefix: %s", _describe(sharing))
            return None
    needed = {*prompts.columns, *spec.keep, "custom_id"}
    spool_id = new_spool_id()
    try:
        items = _iterate_items(sources, prompts, needed, plan)
        is_exact = spec.shard_rows is not None
        spooled = _build_spool(storage, spool_id, items, plan, beat, is_exact=is_exact)
    except BaseException as error:
        with suppress(JobsError):
            delete_spool(storage, spool_id)
        if isinstance(error, ValueTypeError):
            logger.warning("not regrouped by prefix: a column holds values of type %s", error)
            return None
        raise
    whole = spooled.num_shared_bytes / max(1, spooled.num_bytes)
    note = (
        f"regrouped by prefix: {_describe(sharing)}" if sharing else f"regrouped by prefix: {whole:.1%} saved"
    )
    logger.info("%s; the whole job saves %.1f%%", note, 100 * whole)
    figures = {"sorted_whole": round(whole, 4), "spool": f"{spool_id:010x}"}
    if sharing is not None:
        figures |= {"sample_in_order": round(sharing.in_order, 4), "sample_sorted": round(sharing.sorted, 4)}
    return Regrouping(spooled.plan, spool_id, note, figures)


def build_sort_key(messages: Iterable[Mapping[str, Any]]) -> bytes:
    """A prompt as text: two prompts share as much of it as of what a chat template makes of them."""
    parts = []
    for message in messages:
        content = message["content"]
        if len(message) > 2 or content is None:
            content = json.dumps(message, ensure_ascii=False, default=str)
        parts.append(f"{message['role']}\n{content}\n")
    return "".join(parts).encode("utf-8", "surrogatepass")


def _is_candidate(spec: JobSpec, sources: Sequence[Source], plan: Plan) -> bool:
    if spec.regroup == "never" or plan.num_rows < 2:
        return False
    if spec.regroup == "always":
        return True
    if len(plan.shards) < 2:
        return False
    num_bytes = sum(source.size_bytes for source in sources)
    if num_bytes > MAX_INPUT_BYTES:
        logger.info(
            "not regrouped by prefix: the input has %.1f GiB, the limit is %d GiB",
            num_bytes / (1 << 30),
            MAX_INPUT_BYTES >> 30,
        )
        return False
    return True


def _estimate(sources: Sequence[Source], prompts: PromptSource, plan: Plan, beat: _Beat) -> PrefixSharing:
    windows: list[list[bytes]] = []
    num_rows = 0
    for rows in load_windows(sources, plan, prompts.columns):
        windows.append([])
        num_bytes = 0
        for row in rows:
            num_rows += 1
            key = _build_key(prompts, row)
            if key != _LAST_KEY:
                windows[-1].append(key)
                num_bytes += len(key)
            if num_bytes >= MAX_WINDOW_BYTES:
                break
        beat()
    return estimate_sharing(windows, num_rows / plan.num_rows)


def _build_spool(
    storage: Storage, spool_id: int, unsorted: Iterable[SortItem], plan: Plan, beat: _Beat, *, is_exact: bool
) -> Spooled:
    with _open_scratch(storage) as scratch:
        sorter = ExternalSorter(scratch)
        for item in _beating(unsorted, beat):
            sorter.add(item)
        shard_rows = max(shard.num_rows for shard in plan.shards)
        items = _beating(sorter.iterate_sorted(), beat)
        spooled = write_spool(storage, spool_id, items, shard_rows, is_exact=is_exact)
    assert spooled.plan.num_rows == plan.num_rows, (
        f"{spooled.plan.num_rows} of {plan.num_rows} rows in the spool"
    )
    return spooled


def _iterate_items(
    sources: Sequence[Source], prompts: PromptSource, needed: Collection[str], plan: Plan
) -> Iterator[SortItem]:
    for shard in plan.shards:
        for rows in load_rows(sources[shard.source_index], shard, needed):
            for row in rows:
                yield SortItem(
                    _build_key(prompts, row), row.source_index, row.row_index, to_record(row, needed)
                )


def _build_key(prompts: PromptSource, row: Row) -> bytes:
    if row.values is None:
        return _LAST_KEY
    try:
        return build_sort_key(prompts.build(row.values))
    except (RowError, SkipRow):
        return _LAST_KEY


def _open_scratch(storage: Storage) -> BinaryIO:
    """A file without a name: on the output's disk, where there must be room for the spool anyway."""
    if not isinstance(storage, LocalStorage):
        return cast(BinaryIO, tempfile.TemporaryFile(prefix="gristmill-"))
    try:
        storage.path().mkdir(parents=True, exist_ok=True)
        return cast(BinaryIO, tempfile.TemporaryFile(prefix=".gristmill-", dir=storage.root))
    except OSError as error:
        raise write_error(storage.root, error) from error


def _describe(sharing: PrefixSharing) -> str:
    return (
        f"sample saves {sharing.in_order:.1%} of prompt text in input order,"
        f" {max(sharing.sorted, sharing.in_order):.1%} sorted"
    )


def _beating(items: Iterable[SortItem], beat: _Beat) -> Iterator[SortItem]:
    for item in items:
        beat()
        yield item


class _Beat:
    """Asks the caller now and then whether to go on."""

    def __init__(self, go_on: Callable[[], bool]) -> None:
        self._go_on = go_on
        self._next_s = time.monotonic() + BEAT_EVERY_S

    def __call__(self) -> None:
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + BEAT_EVERY_S
        if not self._go_on():
            raise StoppedError
