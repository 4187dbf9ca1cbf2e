"""What is said of two answers by their texts, and how a side of a comparison is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gristmill.worker.show.console import UsageRefused
from gristmill.worker.tools.compare.answers import count_common, find_choice, is_json, parse_choices
from gristmill.worker.tools.compare.sides import Side, build_options, parse_side

CHOICES = ("yes", "no", "not sure", "not")


@pytest.mark.parametrize(
    ("text", "choices", "choice"),
    [
        ("Yes, it is.", CHOICES, "yes"),
        ("**NO**", CHOICES, "no"),
        ("I think the answer is no.", CHOICES, "no"),
        ("I know nothing", CHOICES, None),
        ("not sure", CHOICES, "not sure"),
        ("No. Yes would be wrong.", CHOICES, "no"),
        ("", CHOICES, None),
        ("it is A+, not B", ("A", "A+"), "A+"),
        ("Tie\u0302u cu\u031b\u0323c", ("tích cực", "tiêu cực"), "tiêu cực"),
        ("  - Oslo.", (), "oslo"),
        ("12.5 kg", (), "12.5"),
        ("...", (), None),
    ],
)
def test_the_choice_is_the_one_that_stands_first_as_whole_words_or_the_first_word(
    text: str, choices: tuple[str, ...], choice: str | None
) -> None:
    assert find_choice(text, choices) == choice


def test_choices_are_split_at_commas_and_checked() -> None:
    assert parse_choices(" yes, no ,") == ("yes", "no")
    assert parse_choices(None) == ()
    for text in ("yes", "", "yes,Yes"):
        with pytest.raises(UsageRefused):
            parse_choices(text)


NO_JSON = (
    "",
    "42",
    '"text"',
    "null",
    '{"a": NaN}',
    "{'a': 1}",
    '{"a": 1} and more',
    '```json\n{"a": 1}\n```',
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(text, True) for text in ('{"a": 1}', " [1, 2]\n", "{}")]
    + [(text, False) for text in (*NO_JSON, "[" * 10**5)],
)
def test_only_an_object_or_a_list_is_json(text: str, expected: bool) -> None:
    assert is_json(text) == expected


def test_common_tokens_are_counted_up_to_the_first_difference_or_the_end() -> None:
    assert count_common([1, 2, 3], [1, 2, 4]) == 2
    assert count_common([1, 2], [1, 2, 4]) == 2
    assert count_common([], [1]) == 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A path that holds a comma and an equal sign."""
    path = tmp_path / "m,dtype=x.gguf"
    path.touch()
    return path


def test_a_side_is_a_path_which_may_hold_commas_and_equal_signs_and_settings(model: Path) -> None:
    side = parse_side("B", f"{model},dtype=float32,cpu-kernels=none")
    assert (side.path, dict(side.settings)) == (str(model), {"dtype": "float32", "cpu_kernels": "none"})
    assert side.name == f"{model},dtype=float32,cpu_kernels=none"
    options = build_options(side)
    assert (options.dtype, options.cpu_kernels) == ("float32", "none")
    assert parse_side("A", str(model)) == Side("A", str(model), {})


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
    (tmp_path / "m.gguf").touch()
    with pytest.raises(UsageRefused, match=re.escape(message)):
        parse_side("A", f"{tmp_path}/m.gguf{words}")
