"""Turns a shard's rows into engine requests, off the engine's path: read, render, chat template, tokenize.

A row that can't become a request becomes an error result here (or a skipped one); no row is dropped.
Room for the output: a prompt may fill the context but for one token. Where the job truncates, a cut prompt
leaves room for `max_tokens`, or without that for a quarter of the context, at most 256 tokens.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.engine.errors import ChatTemplateError
from gristmill.engine.request import EngineInfo, Request, SamplingParams
from gristmill.engine.text.tokenizer import Tokenizer
from gristmill.jobs.identity import sample_seed
from gristmill.jobs.input.reading import load_rows
from gristmill.jobs.prompt.source import PromptSource
from gristmill.jobs.regroup.spool import is_spooled, load_spool_rows
from gristmill.jobs.results import SKIPPED, Result
from gristmill.jobs.row_errors import RowError, SkipRow
from gristmill.jobs.rows import Row
from gristmill.jobs.source import ShardRange, Source
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.storage.folder import Storage

MAX_CHARACTERS_PER_TOKEN = 64  # the search for a truncated text looks at no more than this
DEFAULT_OUTPUT_ROOM = 256  # tokens left for the output of a truncated prompt when the job sets no max_tokens

Messages = list[dict[str, Any]]
_request_ids = itertools.count(1)
_groups = itertools.count(1)


@dataclass(frozen=True, slots=True)
class PendingRow:
    """What a row's result needs besides its completion."""

    source_index: int
    row_index: int
    custom_id: str | None
    kept: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A few hundred rows of one shard: requests, what belongs to each, and rows that are finished already."""

    requests: list[Request]
    pending: dict[int, PendingRow]  # by request_id
    results: list[Result]  # faults and skipped rows


def build_sampling(spec: JobSpec) -> SamplingParams:
    """The job's sampling as the engine takes it."""
    fields = spec.sampling.model_dump() | {"max_tokens": spec.max_tokens, "stop": tuple(spec.stop)}
    return SamplingParams(**fields | {"stop_token_ids": tuple(spec.sampling.stop_token_ids)})


class Preparer:
    """Prepares shards of one job for one loaded engine. Used by one thread."""

    def __init__(
        self,
        spec: JobSpec,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        prompt_source: PromptSource,
        info: EngineInfo,
        keep: Sequence[str],
    ) -> None:
        self._spec = spec
        self._sources = sources
        self._tokenizer = tokenizer
        self._prompts = prompt_source
        self._keep = tuple(keep)
        self._columns = frozenset(prompt_source.columns) | set(keep) | {"custom_id"}
        self._sampling = build_sampling(spec)
        self._group = next(_groups)
        self._max_prompt_tokens = info.context_size - 1
        self._max_request_tokens = info.max_request_tokens
        room = spec.max_tokens or min(DEFAULT_OUTPUT_ROOM, info.context_size // 4)
        self._truncated_prompt_tokens = max(1, min(info.context_size, info.max_request_tokens) - room)

    def prepare(
        self, shard: ShardRange, done_rows: Collection[tuple[int, int]], storage: Storage
    ) -> Iterator[PreparedBatch]:
        """The shard's rows that are not in `done_rows`, in order, batch by batch; `storage` may have its spool."""
        for rows in self._load_rows(shard, storage):
            if done_rows:
                rows = [row for row in rows if (row.source_index, row.row_index) not in done_rows]
            if rows:
                yield self.prepare_rows(rows)

    def prepare_rows(self, rows: Sequence[Row]) -> PreparedBatch:
        """One batch: texts first, then all of them through the tokenizer at once."""
        results: list[Result] = []
        ready: list[tuple[Row, Messages]] = []
        texts: list[str] = []
        for row in rows:
            try:
                messages = self._build_messages(row)
                texts.append(self._render(messages))
                ready.append((row, messages))
            except (RowError, SkipRow) as fault:
                results.append(self._build_fault(row, fault))
        requests: list[Request] = []
        pending: dict[int, PendingRow] = {}
        for (row, messages), token_ids in zip(ready, self._tokenizer.encode_batch(texts), strict=True):
            try:
                token_ids = self._fit(messages, token_ids)
            except RowError as fault:
                results.append(self._build_fault(row, fault, len(token_ids)))
                continue
            request_id = next(_request_ids)
            seed = sample_seed(self._spec.seed, row.source_index, row.row_index, 0)
            requests.append(Request(request_id, token_ids, self._sampling, seed, self._group))
            pending[request_id] = PendingRow(
                row.source_index, row.row_index, row.custom_id, self._build_kept(row)
            )
        return PreparedBatch(requests, pending, results)

    def _load_rows(self, shard: ShardRange, storage: Storage) -> Iterator[list[Row]]:
        if is_spooled(shard):
            return load_spool_rows(storage, shard)
        return load_rows(self._sources[shard.source_index], shard, self._columns)

    def _build_messages(self, row: Row) -> Messages:
        if row.error is not None:
            raise row.error
        assert row.values is not None
        return self._prompts.build(row.values)

    def _render(self, messages: Messages) -> str:
        if not self._tokenizer.has_chat_template:
            return self._tokenizer.render_text("\n\n".join([message["content"] for message in messages]))
        try:
            return self._tokenizer.render_chat(messages)
        except ChatTemplateError as error:
            raise RowError("chat_template_error", str(error)) from error

    def _fit(self, messages: Messages, token_ids: array[int]) -> array[int]:
        """The prompt's tokens, truncated if the job says so; raises RowError where they can't fit."""
        num_tokens = len(token_ids)
        if num_tokens <= self._max_prompt_tokens and num_tokens < self._max_request_tokens:
            if num_tokens == 0:
                raise RowError("empty_prompt", "the prompt has no tokens")
            return token_ids
        if self._spec.on_too_long == "error":
            if num_tokens > self._max_prompt_tokens:
                raise _prompt_too_long(num_tokens, self._max_prompt_tokens)
            raise RowError(
                "request_too_large",
                f"the prompt has {num_tokens} tokens and the KV cache holds {self._max_request_tokens} of one"
                " request at most; give the engine more memory or shorten the row",
            )
        fitted = self._truncate(messages)
        if fitted is None:
            raise _prompt_too_long(num_tokens, self._truncated_prompt_tokens)
        return fitted

    def _truncate(self, messages: Messages) -> array[int] | None:
        """The longest cut of the last user message that fits, found by bisection over its characters."""
        index = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
        if index is None:
            return None
        text: str = messages[index]["content"]
        cut: Callable[[int], str] = (
            (lambda size: text[len(text) - size :])
            if self._spec.on_too_long == "truncate-left"
            else (lambda size: text[:size])
        )
        best: array[int] | None = None
        low, high = 1, min(len(text), self._truncated_prompt_tokens * MAX_CHARACTERS_PER_TOKEN)
        while low <= high:
            size = (low + high) // 2
            changed = [*messages[:index], {**messages[index], "content": cut(size)}, *messages[index + 1 :]]
            token_ids = self._tokenizer.encode_batch([self._render(changed)])[0]
            if len(token_ids) <= self._truncated_prompt_tokens:
                best, low = token_ids, size + 1
            else:
                high = size - 1
        return best

    def _build_kept(self, row: Row) -> tuple[Any, ...]:
        if not self._keep or row.values is None:
            return ()
        return tuple([row.values.get(name) for name in self._keep])

    def _build_fault(
        self, row: Row, fault: RowError | SkipRow, num_prompt_tokens: int | None = None
    ) -> Result:
        is_error = isinstance(fault, RowError)
        return Result(
            source_index=row.source_index,
            row_index=row.row_index,
            custom_id=row.custom_id,
            kept=self._build_kept(row),
            completion=None,
            finish_reason="error" if is_error else SKIPPED,
            prompt_tokens=num_prompt_tokens,
            completion_tokens=None,
            cached_tokens=None,
            error_code=fault.code if isinstance(fault, RowError) else None,
            error_message=fault.message if isinstance(fault, RowError) else None,
        )


def _prompt_too_long(num_tokens: int, limit: int) -> RowError:
    return RowError(
        "prompt_too_long",
        f"the prompt has {num_tokens} tokens and at most {limit} fit; shorten it or set --on-too-long",
    )
