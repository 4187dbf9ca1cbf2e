"""What is said of two answers by their texts, and how a side of a comparison is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.worker.show.console import UsageRefused
from gristmill.worker.tools.compare.answers import count_common, find_choice, is_json, parse_choices
from gristmill.worker.tools.compare.sides import build_options, parse_side


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("Yes, it is.", "yes"),
        ("**NO**", "no"),
        ("I think the answer is no.", "no"),
        ("I know nothing", None),
        ("not sure", "not sure"),
        ("No. Yes would be wrong.", "no"),
        ("", None),
    ],
)
def test_the_choice_is_the_one_that_stands_first_as_whole_words(text: str, choice: str | None) -> None:
    assert find_choice(text, ("yes", "no", "not sure", "not")) == choice


def test_choices_need_no_letters_and_their_accents_may_be_composed_or_not() -> None:
    assert find_choice("it is A+, not B", ("A", "A+")) == "A+"
    assert find_choice("Tie\u0302u cu\u031b\u0323c", ("tích cực", "tiêu cực")) == "tiêu cực"


def test_without_choices_the_first_word_is_the_choice() -> None:
    assert find_choice("  - Oslo.", ()) == "oslo"
    assert find_choice("12.5 kg", ()) == "12.5"
    assert find_choice("...", ()) is None


def test_choices_are_split_at_commas_and_checked() -> None:
    assert parse_choices(" yes, no ,") == ("yes", "no")
    assert parse_choices(None) == ()
    for text in ("yes", "", "yes,Yes"):
        with pytest.raises(UsageRefused):
            parse_choices(text)


@pytest.mark.parametrize("text", ['{"a": 1}', " [1, 2]\n", "{}"])
def test_an_object_or_a_list_is_json(text: str) -> None:
    assert is_json(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        '"text"',
        "null",
        '{"a": NaN}',
        "{'a': 1}",
        '{"a": 1} and more',
        '```json\n{"a": 1}\n```',
        "[" * 10**5,
    ],
)
def test_anything_else_is_not(text: str) -> None:
    assert not is_json(text)


def test_common_tokens_are_counted_up_to_the_first_difference_or_the_end() -> None:
    assert count_common([1, 2, 3], [1, 2, 4]) == 2
    assert count_common([1, 2], [1, 2, 4]) == 2
    assert count_common([], [1]) == 0


def test_a_side_is_a_path_and_settings(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    side = parse_side("B", f"{model},dtype=float32,cpu-kernels=none")
    assert (side.path, dict(side.settings)) == (str(model), {"dtype": "float32", "cpu_kernels": "none"})
    assert side.name == f"{model},dtype=float32,cpu_kernels=none"
    options = build_options(side)
    assert (options.dtype, options.cpu_kernels) == ("float32", "none")
    assert parse_side("A", str(model)).settings == {}


def test_a_path_may_hold_commas_and_equal_signs(tmp_path: Path) -> None:
    model = tmp_path / "m,dtype=x.gguf"
    model.touch()
    assert parse_side("A", str(model)).path == str(model)
    side = parse_side("A", f"{model},dtype=float32")
    assert (side.path, dict(side.settings)) == (str(model), {"dtype": "float32"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (",int4", "A: 'int4' is not k=v; write PATH,k=v,... with any of quantization"),
        (",color=red", "A: 'color' is not a setting; write PATH,k=v"),
        (",dtype=float16", "A: dtype='float16' is not known; choose one of auto, bfloat16, float32"),
        (",dtype=", "A: dtype='' is not known"),
        (",dtype=auto,dtype=float32", "A: dtype is given twice"),
    ],
)
def test_settings_that_are_not_understood_are_refused_by_name(
    tmp_path: Path, words: str, message: str
) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    with pytest.raises(UsageRefused) as refused:
        parse_side("A", f"{model}{words}")
    assert message in str(refused.value)
