"""Cutting texts and remembering pieces never changes an id, whatever the text; what can't be cut isn't."""

from __future__ import annotations

import copy
import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.engine.checkpoint.gguf import load_gguf
from gristmill.engine.text import piece_memo
from gristmill.engine.text.gguf_tokenizer import gguf_tokenizer_spec
from gristmill.engine.text.piece_memo import PieceMemo, can_cut
from gristmill.engine.text.tokenizer import ModelTokenizer, load_tokenizer
from tests.engine.chats import TEXTS
from tests.engine.tiny_models import build_tiny_gguf, build_tiny_model

KINDS = ["gpt-2", "smollm", "qwen2", "llama-bpe", "tekken"]

# What the rules of pre-tokenizers are about: spaces of every kind, digits, marks, contractions, added tokens.
ATOMS = [
    " ", " ", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u0085", "\u200b", "\x1c", "a", "B", "word", "'s",
    "'RE", "1", "234", ".", ",", "!?", "-", "_", "/", "(", "é", "e\u0301", "\u0301", "đã", "你好", "ß", "ǅ", "½", "Ⅷ",
    "٣", "\u200d", "😀", "\ud7a3", "\u1161", "<s>", "</s>", "\x00", "caf",
]  # fmt: skip
PROSE = st.lists(st.sampled_from(ATOMS), max_size=24).map("".join)


@pytest.fixture(scope="module")
def gguf_specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The description of a tiny tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    model = build_tiny_model(folder / "m", "llama")
    paths = {
        kind: build_tiny_gguf(model, folder / f"{kind}.gguf", **{"tokenizer.ggml.pre": kind})
        for kind in KINDS
    }
    return {kind: gguf_tokenizer_spec(load_gguf(str(path))).backend for kind, path in paths.items()}


class Plain:
    """Encodes whole texts, and counts them."""

    def __init__(self, description: dict[str, Any]) -> None:
        self.backend = tokenizers.Tokenizer.from_str(json.dumps(description))
        self.num_texts = 0

    def encode(self, texts: list[str]) -> list[array[int]]:
        self.num_texts += len(texts)
        return [array("I", e.ids) for e in self.backend.encode_batch(texts, add_special_tokens=False)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_the_ids_it_has_as_a_whole(kind: str, gguf_specs: dict[str, dict[str, Any]]) -> None:
    assert can_cut(gguf_specs[kind])
    plain = Plain(gguf_specs[kind])
    memo = PieceMemo(plain.encode)

    @settings(max_examples=150, deadline=None, database=None)
    @given(st.lists(PROSE, max_size=4))
    def check(texts: list[str]) -> None:
        expected = plain.encode(texts)
        assert memo.encode_batch(texts) == expected
        assert memo.encode_batch(texts) == expected  # from what it remembers

    check()


def test_smollm2_gives_the_same_ids_with_and_without_the_memo(smollm2_path: str) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    assert isinstance(tokenizer, ModelTokenizer)
    plain = Plain(json.loads(tokenizer._backend.to_str()))
    messages = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": ""}]
    texts = TEXTS + [tokenizer.render_chat([messages[0], {**messages[1], "content": text}]) for text in TEXTS]
    texts = [text for text in texts if not text.startswith(tokenizer._guard)]
    for _ in range(2):
        assert tokenizer.encode_batch(texts) == plain.encode(texts)


def test_what_was_seen_is_not_encoded_again(gguf_specs: dict[str, dict[str, Any]]) -> None:
    plain = Plain(gguf_specs["smollm"])
    memo = PieceMemo(plain.encode)
    memo.encode_batch(["one two three", "one three two"])
    assert plain.num_texts == 3
    memo.encode_batch(["one two two three three"] * 10)
    assert plain.num_texts == 3


def test_memory_is_bounded_by_pieces_and_their_length(
    gguf_specs: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_memo, "MAX_PIECES", 100)
    memo = PieceMemo(Plain(gguf_specs["smollm"]).encode)
    for i in range(50):
        memo.encode_batch([f"{'x' * 60}{i} {'y' * 60} {' '.join(str(10 * i + k) for k in range(10))}"])
        assert len(memo._heads) + len(memo._tails) <= 100 + 12
    assert all(len(piece) <= piece_memo.MAX_PIECE_CHARS for piece in [*memo._heads, *memo._tails])


def test_tokenizers_with_other_rules_are_not_cut(
    metaspace: Path, gguf_specs: dict[str, dict[str, Any]]
) -> None:
    assert not can_cut(json.loads((metaspace / "tokenizer.json").read_text(encoding="utf-8")))
    good = gguf_specs["qwen2"]
    assert can_cut(good)
    for change in (
        lambda d: d["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\S+ \S+|.+"),
        lambda d: d["pre_tokenizer"]["pretokenizers"][0].update(behavior="MergedWithNext"),
        lambda d: d["pre_tokenizer"]["pretokenizers"][-1].update(add_prefix_space=True),
        lambda d: d["pre_tokenizer"]["pretokenizers"].pop(0),
        lambda d: d.update(pre_tokenizer=None),
        lambda d: d.update(normalizer={"type": "Lowercase"}),
        lambda d: d["model"].update(dropout=0.1),
        lambda d: d["added_tokens"].append({"content": "two words"}),
        lambda d: d["added_tokens"].append({"content": "<mask>", "lstrip": True}),
    ):
        other = copy.deepcopy(good)
        change(other)
        assert not can_cut(other)
