"""Text from ids, one by one and all at once, against `tokenizers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.engine.chats import TEXTS


@pytest.fixture(scope="module")
def byte_level_pair(byte_level: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    return load_tokenizer(str(byte_level)), tokenizers.Tokenizer.from_file(str(byte_level / "tokenizer.json"))


def _assert_incremental(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    pieces = [*(detokenizer.push(i) for i in ids), detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)
    return "".join(pieces)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_text_pushed_token_by_token_is_the_text_of_transformers(
    kind: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    tokenizer = load_tokenizer(str(folder))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert _assert_incremental(tokenizer, ids) == backend.decode(ids) == text


def test_a_character_split_across_tokens_appears_with_its_last_byte(byte_level: Path) -> None:
    tokenizer = load_tokenizer(str(byte_level))
    ids = tokenizer.encode_batch(["東"])[0]
    detokenizer = tokenizer.detokenizer()
    assert len(ids) == 3
    assert [detokenizer.push(i) for i in ids] == ["", "", "東"]


def test_special_tokens_have_no_text_and_do_not_break_a_character(byte_level: Path) -> None:
    tokenizer = load_tokenizer(str(byte_level))
    first, second, third = tokenizer.encode_batch(["東"])[0]
    assert tokenizer.decode([1, first, 2, second, 0, third, 2]) == "東"
    assert tokenizer.decode([9999]) == ""


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 399), max_size=30))
def test_any_ids_of_byte_level_bpe_decode_as_tokenizers_decodes_them(
    byte_level_pair: tuple[Tokenizer, tokenizers.Tokenizer], ids: list[int]
) -> None:
    tokenizer, backend = byte_level_pair
    assert _assert_incremental(tokenizer, ids) == backend.decode(ids)


def test_bytes_that_are_not_utf8_become_replacement_characters(metaspace: Path) -> None:
    tokenizer = load_tokenizer(str(metaspace))
    backend = tokenizers.Tokenizer.from_file(str(metaspace / "tokenizer.json"))
    byte = backend.token_to_id
    assert (
        _assert_incremental(tokenizer, [byte("<0xF0>"), byte("<0x9F>"), byte("<0x98>"), byte("<0x80>")])
        == "😀"
    )
    assert (
        _assert_incremental(tokenizer, [byte("<0xF0>"), byte("<0x9F>"), byte("▁"), byte("o")]) == "\ufffd o"
    )
    assert _assert_incremental(tokenizer, [byte("<0xFF>")]) == "\ufffd"
    assert _assert_incremental(tokenizer, [byte("<0xC3>")]) == "\ufffd"
