"""Stop strings over tokens and multi-byte characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gristmill.engine.text.stop import StopChecker
from gristmill.engine.text.tokenizer import NullTokenizer

TOKENIZER = NullTokenizer()


def _run(stop: tuple[str, ...], text: str | bytes) -> str | None:
    """Push the text byte by byte, the hardest way to cut it into tokens."""
    checker = StopChecker(stop, TOKENIZER.detokenizer())
    for byte in text.encode() if isinstance(text, str) else text:
        if (cut := checker.push(byte)) is not None:
            return cut
    return None


class _Pieces:
    """A detokenizer whose token i is piece i."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def finish(self) -> str:
        return ""


def test_a_stop_string_that_spans_tokens_cuts_the_text_before_it() -> None:
    assert _run(("END",), "one END two") == "one "


def test_a_stop_string_of_multi_byte_characters_is_found() -> None:
    assert _run(("đơn",), "một đơn hàng") == "một "
    assert _run(("👩‍👧",), "x👩‍👧y") == "x"


def test_text_that_only_begins_a_stop_string_goes_on() -> None:
    assert _run(("END",), "EN EN E") is None
    assert _run(("aab",), "aaaab") == "aa"


def test_no_stop_strings_collect_the_whole_text() -> None:
    checker = StopChecker((), TOKENIZER.detokenizer())
    assert [checker.push(byte) for byte in b"abc"] == [None] * 3
    assert checker.text == checker.finish() == "abc"


def test_an_empty_stop_string_is_no_stop_string() -> None:
    assert _run(("",), "abc") is None


def test_the_earliest_of_several_stop_strings_wins_also_inside_one_token() -> None:
    checker = StopChecker(("zzz", "\n", "two"), _Pieces(["one\ntwo zzz"]))
    assert checker.push(0) == "one"


def test_of_stop_strings_that_end_together_the_longest_is_cut() -> None:
    assert _run(("b", "ab"), "xxab") == "xx"


def test_finish_adds_a_character_that_never_became_complete() -> None:
    checker = StopChecker(("END",), TOKENIZER.detokenizer())
    for byte in b"caf\xc3":
        assert checker.push(byte) is None
    assert checker.text == "caf"
    assert checker.finish() == "caf\ufffd"


def test_finish_is_cut_when_the_last_character_completes_a_stop_string() -> None:
    checker = StopChecker(("\ufffd",), TOKENIZER.detokenizer())
    for byte in b"caf\xc3":
        assert checker.push(byte) is None
    assert checker.finish() == "caf"


@given(
    st.text("abđ😀", max_size=20), st.lists(st.text("abđ😀", min_size=1, max_size=4), max_size=3), st.data()
)
def test_the_cut_does_not_depend_on_how_the_text_is_split(
    text: str, stop: list[str], data: st.DataObject
) -> None:
    bounds = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *bounds], [*bounds, len(text)], strict=True)]
    checker = StopChecker(tuple(stop), _Pieces(pieces))
    cuts = [cut for i in range(len(pieces)) if (cut := checker.push(i)) is not None]
    assert (cuts[0] if cuts else None) == _run(tuple(stop), text)
