"""The rows that `gristmill bench` runs: read from a workload file, or made up as a tree of shared prefixes.

Each row is token ids and the exact number of tokens to generate. Nothing here knows an engine.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.worker.show.console import UsageRefused

MAX_TOKEN_ID = 2**32 - 1
MAX_SKEW = 40.0  # of the exponential over the whole range of lengths: beyond it all lengths are the shortest

Encode = Callable[[list[str]], list["array[int]"]]


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One prompt and how many tokens follow it, the end of text ignored."""

    token_ids: array[int]  # typecode "I"
    max_tokens: int


class Level(NamedTuple):
    """One level of the tree: every node of the level above has fan_out children of num_tokens tokens."""

    num_tokens: int
    fan_out: int


class Lengths(NamedTuple):
    """Lengths from low to high: even, or with a mean, falling (or rising) exponentially towards the end."""

    low: int
    high: int
    mean: float | None = None


@dataclass(frozen=True, slots=True)
class SyntheticSpec:
    """A made-up workload. The rows are spread evenly over the leaves of the tree, in the order of the leaves."""

    num_rows: int
    levels: tuple[Level, ...]
    prompt_tokens: Lengths  # of the part that is a row's own
    output_tokens: Lengths
    vocab_size: int
    seed: int


def build_synthetic(spec: SyntheticSpec) -> list[BenchRow]:
    """The rows of the spec; the same spec gives the same rows."""
    rng = np.random.default_rng(spec.seed)
    own_sizes = draw_lengths(spec.prompt_tokens, spec.num_rows, rng)
    output_sizes = draw_lengths(spec.output_tokens, spec.num_rows, rng)
    fan_outs = [level.fan_out for level in spec.levels]
    num_leaves = int(np.prod(fan_outs, dtype=np.int64))
    rows = []
    for index in range(spec.num_rows):
        leaf = index * num_leaves // spec.num_rows
        parts = []
        for depth, level in enumerate(spec.levels):
            node = leaf // int(np.prod(fan_outs[depth + 1 :], dtype=np.int64))
            node_rng = np.random.default_rng([spec.seed, depth, node])
            parts.append(node_rng.integers(spec.vocab_size, size=level.num_tokens, dtype=np.uint32))
        parts.append(rng.integers(spec.vocab_size, size=own_sizes[index], dtype=np.uint32))
        rows.append(BenchRow(array("I", np.concatenate(parts).tobytes()), int(output_sizes[index])))
    return rows


def draw_lengths(lengths: Lengths, num_rows: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """One length a row. Drawn by strata, so that any seed's mean is close to the one asked for."""
    values = np.arange(lengths.low, lengths.high + 1)
    steps = np.arange(len(values)) / max(1, len(values) - 1)
    weights = np.ones(len(values))
    if lengths.mean is not None and len(values) > 1:
        weights = _skewed(steps, (lengths.mean - lengths.low) / (lengths.high - lengths.low))
    bounds = np.cumsum(weights / weights.sum())
    quantiles = (np.arange(num_rows) + rng.random(num_rows)) / num_rows
    picked = np.minimum(np.searchsorted(bounds, quantiles, side="right"), len(values) - 1)
    drawn: NDArray[np.int64] = rng.permutation(values[picked]).astype(np.int64)
    return drawn


def _skewed(steps: NDArray[np.float64], mean: float) -> NDArray[np.float64]:
    """Weights exp(-skew * step) whose mean step is `mean`, found by bisection; steps lie in 0..1."""
    low, high = -MAX_SKEW * len(steps), MAX_SKEW * len(steps)
    for _ in range(100):
        skew = (low + high) / 2
        exponents = -skew * steps
        weights: NDArray[np.float64] = np.exp(exponents - exponents.max())
        if (weights * steps).sum() > mean * weights.sum():
            low = skew
        else:
            high = skew
    return weights


def shuffle_rows(rows: Sequence[BenchRow], seed: int) -> list[BenchRow]:
    """The rows in another order."""
    return [rows[i] for i in np.random.default_rng([seed, 1]).permutation(len(rows))]


def load_workload(
    path: Path, name: str | None, num_rows: int | None, encode: Encode | None
) -> list[BenchRow]:
    """The first num_rows rows of a JSONL file, of those whose `wl` is the name if there is one.

    encode: token ids of texts, for rows with a `prompt`; None where there is no tokenizer.
    """
    records = _load_records(path)
    found = [(number, record) for number, record in records if name is None or record.get("wl") == name]
    if not found:
        names = sorted({str(record["wl"]) for _, record in records if "wl" in record})
        there = f": it has {', '.join(names)}" if names else ""
        raise UsageRefused(f"{path}: no rows" + (f" of workload {name!r}{there}" if name else ""))
    found = found[:num_rows]
    texts = [record["prompt"] for number, record in found if _has_text(path, number, record)]
    if texts and encode is None:
        raise UsageRefused(f"{path}: rows with a `prompt` need the tokenizer of a --model; --shape has none")
    encoded = iter(encode(texts) if encode is not None and texts else [])
    return [_to_row(path, number, record, encoded) for number, record in found]


def _load_records(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageRefused(f"{path}: {error.strerror}: give a readable workload file") from error
    except UnicodeDecodeError as error:
        raise UsageRefused(f"{path}: not UTF-8 at byte {error.start}: give a JSONL file") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UsageRefused(f"{path} line {number}: not JSON ({error}): give a JSONL file") from error
        if not isinstance(record, dict):
            raise UsageRefused(f"{path} line {number}: not an object; a row is {{ids, max_tokens}}")
        records.append((number, record))
    return records


def _has_text(path: Path, number: int, record: dict[str, Any]) -> bool:
    """Whether the row's prompt is text; raises UsageRefused when it has none, or both."""
    if ("ids" in record) == ("prompt" in record):
        raise UsageRefused(f"{path} line {number}: a row needs either `ids` or `prompt`")
    if "prompt" in record and not isinstance(record["prompt"], str):
        raise UsageRefused(f"{path} line {number}: `prompt` is not a text")
    return "prompt" in record


def _to_row(path: Path, number: int, record: dict[str, Any], encoded: Any) -> BenchRow:
    max_tokens = record.get("max_tokens")
    if type(max_tokens) is not int or max_tokens < 1:
        raise UsageRefused(
            f"{path} line {number}: `max_tokens` is {max_tokens!r}: give a whole number from 1"
        )
    ids = next(encoded) if "prompt" in record else record["ids"]
    if not isinstance(ids, list | array) or not all(type(i) is int and 0 <= i <= MAX_TOKEN_ID for i in ids):
        raise UsageRefused(f"{path} line {number}: `ids` is not a list of token ids")
    if not ids:
        raise UsageRefused(f"{path} line {number}: the prompt has no tokens")
    return BenchRow(array("I", ids), max_tokens)


def parse_levels(text: str) -> tuple[Level, ...]:
    """The levels of `300:1,200:8`, from the root: tokens, then how many nodes of them below each node above."""
    levels = []
    for item in text.split(","):
        tokens, colon, fan_out = item.strip().partition(":")
        if not (tokens.isdecimal() and (fan_out.isdecimal() or not colon)):
            raise UsageRefused(f"--levels {text!r}: {item!r} is not TOKENS:FAN-OUT, as in 300:1,200:8")
        level = Level(int(tokens), int(fan_out or 1))
        if min(level) < 1:
            raise UsageRefused(f"--levels {text!r}: {item!r} has a zero; tokens and fan-out start at 1")
        levels.append(level)
    return tuple(levels)


def parse_lengths(flag: str, text: str) -> Lengths:
    """`64`, `8-512`, or `8-512:60` for lengths with a mean of 60."""
    span, colon, mean_text = text.strip().partition(":")
    low_text, dash, high_text = span.partition("-")
    try:
        low = int(low_text)
        lengths = Lengths(low, int(high_text) if dash else low, float(mean_text) if colon else None)
    except ValueError:
        raise UsageRefused(f"{flag} {text!r} is not LOW-HIGH or LOW-HIGH:MEAN, as in 8-512:60") from None
    if not 1 <= lengths.low <= lengths.high:
        raise UsageRefused(f"{flag} {text!r}: give LOW from 1, and HIGH from LOW on")
    if lengths.mean is not None and not lengths.low <= lengths.mean <= lengths.high:
        raise UsageRefused(f"{flag} {text!r}: the mean lies between {lengths.low} and {lengths.high}")
    return lengths
