"""The rows of a benchmark: read from files, made up as a tree, and the words that describe them."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gristmill.engine.batch.prefix import max_shared_tokens
from gristmill.worker.show.console import UsageRefused
from gristmill.worker.tools.bench.shape import SHAPES, parse_shape
from gristmill.worker.tools.bench.workload import (
    BenchRow,
    Lengths,
    Level,
    SyntheticSpec,
    build_synthetic,
    draw_lengths,
    load_workload,
    parse_lengths,
    parse_levels,
    shuffle_rows,
)

SMALL = "hidden=64,layers=2,heads=4,kv_heads=2,intermediate=96,vocab=300"


def build_spec(**fields: Any) -> SyntheticSpec:
    values: dict[str, Any] = {
        "num_rows": 24,
        "levels": (Level(30, 1), Level(20, 3)),
        "prompt_tokens": Lengths(5, 9),
        "output_tokens": Lengths(4, 4),
        "vocab_size": 50_000,
        "seed": 7,
    }
    return SyntheticSpec(**(values | fields))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "w.jsonl"


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_rows_share_the_prefixes_of_their_place_in_the_tree() -> None:
    rows = build_synthetic(build_spec())
    assert len({tuple(row.token_ids[:30]) for row in rows}) == 1
    leaves = Counter(tuple(row.token_ids[:50]) for row in rows)
    assert sorted(leaves.values()) == [8, 8, 8]
    assert len({tuple(row.token_ids) for row in rows}) == 24
    assert all(55 <= len(row.token_ids) <= 59 and row.max_tokens == 4 for row in rows)


def test_the_tree_saves_what_its_levels_say() -> None:
    rows = build_synthetic(build_spec(levels=(Level(30, 2), Level(20, 4)), num_rows=64))
    saved = max_shared_tokens(row.token_ids for row in rows)
    assert saved == 64 * 50 - (2 * 30 + 8 * 20)


def test_rows_without_levels_share_nothing() -> None:
    rows = build_synthetic(build_spec(levels=()))
    assert max_shared_tokens(row.token_ids for row in rows) == 0
    assert all(5 <= len(row.token_ids) <= 9 for row in rows)


def test_a_seed_gives_the_same_rows_and_another_one_others_shuffled_or_not() -> None:
    rows = build_synthetic(build_spec())
    assert build_synthetic(build_spec()) == rows != build_synthetic(build_spec(seed=8))
    assert rows != shuffle_rows(rows, 3) == shuffle_rows(rows, 3)
    assert sorted(row.token_ids for row in rows) == sorted(row.token_ids for row in shuffle_rows(rows, 3))


def draw(lengths: Lengths, num_rows: int = 1000) -> NDArray[np.int64]:
    return draw_lengths(lengths, num_rows, np.random.default_rng(1))


@pytest.mark.parametrize("mean", [9.0, 60.0, 260.0, 500.0])
def test_lengths_have_the_mean_that_was_asked_for(mean: float) -> None:
    drawn = draw(Lengths(8, 512, mean))
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.min() >= 8 and drawn.max() <= 512


@pytest.mark.parametrize(
    "lengths", [Lengths(64, 64), Lengths(64, 64, 64), Lengths(8, 512, 8), Lengths(8, 512, 512)]
)
def test_lengths_at_the_ends_of_the_range_are_those_ends(lengths: Lengths) -> None:
    assert set(draw(lengths, 50).tolist()) == {int(lengths.mean or lengths.low)}


def test_even_lengths_use_the_whole_range_and_skewed_ones_have_many_short_and_a_few_long_ones() -> None:
    assert Counter(draw(Lengths(1, 10)).tolist()) == dict.fromkeys(range(1, 11), 100)
    skewed = draw(Lengths(8, 512, 60))
    assert np.median(skewed) < 50 and skewed.max() > 250


def test_a_file_gives_the_rows_of_one_workload(file: Path) -> None:
    rows = [{"wl": "A", "ids": [1, 2], "max_tokens": 3}, {"wl": "B", "ids": [9], "max_tokens": 1}]
    write_rows(file, rows[0], "", rows[1], {"wl": "A", "ids": [4], "max_tokens": 5})
    rows_a = [BenchRow(array("I", [1, 2]), 3), BenchRow(array("I", [4]), 5)]
    assert load_workload(file, "A", None, None) == rows_a
    assert load_workload(file, "A", 1, None) == rows_a[:1]
    assert len(load_workload(file, None, None, None)) == 3


def test_prompts_are_encoded_all_at_once_and_keep_their_places(file: Path) -> None:
    values = [("prompt", "ab"), ("ids", [7]), ("prompt", "c")]
    write_rows(file, *({name: value, "max_tokens": 1} for name, value in values))
    calls = []

    def encode(texts: list[str]) -> list[array[int]]:
        calls.append(texts)
        return [array("I", list(text.encode())) for text in texts]

    rows = load_workload(file, None, None, encode)
    assert [row.token_ids.tolist() for row in rows] == [[97, 98], [7], [99]]
    assert calls == [["ab", "c"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: not an object"),
        ({"max_tokens": 1}, "either `ids` or `prompt`"),
        ({"ids": [1], "prompt": "a", "max_tokens": 1}, "either `ids` or `prompt`"),
        ({"prompt": 5, "max_tokens": 1}, "`prompt` is not a text"),
        ({"prompt": "a", "max_tokens": 1}, "tokenizer of a --model"),
        *(({"ids": [1], "max_tokens": value}, f"`max_tokens` is {value}") for value in (None, 0, True)),
        ({"ids": [], "max_tokens": 1}, "the prompt has no tokens"),
        *(({"ids": ids, "max_tokens": 1}, "not a list of token ids") for ids in ([-1], [2**32], "12")),
    ],
)
def test_a_row_that_can_not_run_is_refused_with_its_line(file: Path, row: Any, message: str) -> None:
    with pytest.raises(UsageRefused) as refusal:
        load_workload(write_rows(file, row), None, None, None)
    text = refusal.value.format_message()
    assert message in text and text.startswith(str(file)) and "\n" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"wl": "B", "ids": [1], "max_tokens": 1}', "no rows of workload 'A': it has B"),
        (b"", "no rows"),
        (b"\xff\xfe", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_file_without_the_rows_that_are_wanted_is_refused(
    file: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageRefused, match=message):
        load_workload(file, "A" if content else None, None, None)


def test_levels_lengths_and_shapes_are_read_as_they_are_written() -> None:
    assert parse_levels("300:1, 200:8") == (Level(300, 1), Level(200, 8))
    assert parse_levels("300") == (Level(300, 1),)
    assert parse_lengths("--x", "64") == Lengths(64, 64)
    assert parse_lengths("--x", "8-512") == Lengths(8, 512)
    assert parse_lengths("--x", "8-512:60.5") == Lengths(8, 512, 60.5)
    spelled = parse_shape("hidden=576,layers=30,heads=9,kv_heads=3,intermediate=1536,vocab=49152")
    assert spelled == parse_shape("smollm2-135m") == SHAPES["smollm2-135m"]
    assert spelled.head_dim == 64 and spelled.tie_embeddings
    other = parse_shape(f"{SMALL},head_dim=32,context=99,tied=0")
    assert (other.head_dim, other.context_size, other.tie_embeddings) == (32, 99, False)


LEVELS = ("", "300:", "a:1", "300:1,", "0:1", "300:0", "-3:1", "1.5:2")
LENGTHS = ("", "x", "8-", "512-8", "0-4", "8-512:", "8-512:600", "8-512:nan", "8-512:4")


@pytest.mark.parametrize(("flag", "text"), [("--levels", t) for t in LEVELS] + [("--x", t) for t in LENGTHS])
def test_levels_and_lengths_that_are_none_are_refused_by_their_flag(flag: str, text: str) -> None:
    with pytest.raises(UsageRefused, match=flag):
        parse_levels(text) if flag == "--levels" else parse_lengths(flag, text)


def test_the_named_shapes_have_the_sizes_of_their_names() -> None:
    for name, config in SHAPES.items():
        layer = config.hidden_size * (
            2 * config.num_heads * config.head_dim
            + 2 * config.num_kv_heads * config.head_dim
            + 3 * config.intermediate_size
        )
        embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
        number = name.rsplit("-", 1)[1]
        named = float(number[:-1]) * {"m": 1e6, "b": 1e9}[number[-1]]
        assert config.num_layers * layer + embeddings == pytest.approx(named, rel=0.25), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt-9", "one of smollm2-135m"),
        ("hidden=64", "layers, heads, kv_heads, intermediate, vocab missing"),
        ("hidden=64,depth=3", "'depth' is not one of"),
        ("hidden=x", "hidden=x is not a whole number"),
        ("hidden=64,layers=2,heads=4,kv_heads=3,intermediate=96,vocab=300", "4 heads over 3 kv_heads"),
        ("hidden=65,layers=2,heads=4,kv_heads=2,intermediate=96,vocab=300", "give head_dim"),
        ("hidden=32,layers=2,heads=4,kv_heads=2,intermediate=96,vocab=300", "not a multiple of 16"),
    ],
)
def test_a_shape_that_can_not_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageRefused, match=message):
        parse_shape(text)
