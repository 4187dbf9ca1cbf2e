"""Remembers the ids of the pieces that a job's texts are made of, so that most of a text is looked up, not encoded.

A text is cut before single spaces between visible characters. For the pre-tokenizers known here no rule of theirs
reaches over such a cut, so the pieces' ids in a row are the text's; other tokenizers encode whole texts as ever.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from gristmill.engine.text.gguf_tokenizer import SPLIT_PATTERNS

MAX_PIECES = 1 << 16  # remembered at a time, some 15 MB
MAX_PIECE_CHARS = 48  # longer ones hardly come again

EncodeTexts: TypeAlias = "Callable[[list[str]], list[array[int]]]"


def can_cut(description: dict[str, Any]) -> bool:
    """Whether a tokenizer (as in tokenizer.json) gives a text the ids of its pieces."""
    model, normalizer = description["model"], description.get("normalizer")
    return (
        model.get("type", "BPE") == "BPE"
        and not model.get("dropout")
        and (normalizer is None or normalizer.get("type") == "NFC")
        and _splits_at_spaces(description.get("pre_tokenizer"))
        and not any(map(_reaches_over, description.get("added_tokens") or []))
    )


def _splits_at_spaces(step: dict[str, Any] | None) -> bool:
    """Whether the pre-tokenizer is byte-level BPE's, after a split by a pattern that is known to end at spaces."""
    if step is None:
        return False
    *before, last = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        return False
    is_split = [_is_known_split(item) for item in before]
    digits_only = all(item["type"] == "Digits" for item in before)
    return digits_only if last.get("use_regex", True) else is_split == [True]


def _is_known_split(step: dict[str, Any]) -> bool:
    return (
        step["type"] == "Split"
        and step["pattern"].get("Regex") in SPLIT_PATTERNS
        and step["behavior"] == "Isolated"
        and not step.get("invert")
    )


def _reaches_over(added: dict[str, Any]) -> bool:
    """Whether an added token holds a space, or looks at the characters around it."""
    return " " in added["content"] or any(added.get(key) for key in ("lstrip", "rstrip", "single_word"))


class PieceMemo:
    """Encodes batches of texts with what it remembers; threads take turns."""

    def __init__(self, encode: EncodeTexts) -> None:
        """encode: texts to their ids, by a tokenizer that `can_cut`."""
        self._encode = encode
        self._lock = threading.Lock()
        self._heads: dict[str, bytes] = {}  # first piece -> ids
        self._tails: dict[str, bytes] = {}  # other pieces, without the space before; both ends are visible

    def encode_batch(self, texts: list[str]) -> list[array[int]]:
        """The ids of each text."""
        with self._lock:
            if len(self._heads) + len(self._tails) > MAX_PIECES:
                self._heads.clear()
                self._tails.clear()
            cut = [self._cut(text) for text in texts]
            passing = self._learn({p.head for p in cut}, set().union(*[p.new for p in cut]))
            heads, tails = self._heads, self._tails
            result = [array("I", heads[p.head] + b"".join(map(tails.__getitem__, p.tail))) for p in cut]
            for memo, piece in passing:
                del memo[piece]
            return result

    def _learn(self, heads: set[str], tails: set[str]) -> list[tuple[dict[str, bytes], str]]:
        """Encodes the pieces that are not known; returns those that are not worth keeping, or can't be."""
        new = [(self._heads, piece, piece) for piece in heads if piece not in self._heads]
        new += [(self._tails, piece, f" {piece}") for piece in tails]
        passing = []
        for (memo, piece, _), ids in zip(new, self._encode([text for *_, text in new]), strict=True):
            memo[piece] = ids.tobytes()
            if len(piece) > MAX_PIECE_CHARS or not (_is_visible(piece[:1]) and _is_visible(piece[-1:])):
                passing.append((memo, piece))
        return passing

    def _cut(self, text: str) -> _Cut:
        """Cuts at spaces, but for those beside another white space or a mark: those stay in a piece.

        Words that are known are visible at both ends, so only the others are looked at.
        """
        head, *tail = text.split(" ")
        new = set(tail).difference(self._tails)
        odd = {word for word in new if not (_is_visible(word[:1]) and _is_visible(word[-1:]))}
        if not odd and (_is_visible(head[-1:]) or not tail):
            return _Cut(head, tail, new)
        words = [head, *tail]
        glued = set() if _is_visible(head[-1:]) else {1}  # indices of words that stay with the one before
        for i, word in enumerate(words):
            if i and word in odd:
                if not _is_visible(word[:1]):
                    glued.add(i)
                if not _is_visible(word[-1:]):
                    glued.add(i + 1)
        head, *tail = _glue(words, sorted(glued - {len(words)}))
        return _Cut(head, tail, set(tail).difference(self._tails))


class _Cut(NamedTuple):
    """A text in pieces; `tail` without the spaces that they begin with, `new` those of it that are not known."""

    head: str
    tail: list[str]
    new: set[str]


def _glue(words: list[str], glued: list[int]) -> list[str]:
    pieces: list[str] = []
    done = k = 0
    while k < len(glued):
        first, end = glued[k] - 1, glued[k] + 1
        k += 1
        while k < len(glued) and glued[k] == end:
            end += 1
            k += 1
        pieces += words[done:first]
        pieces.append(" ".join(words[first:end]))
        done = end
    return pieces + words[done:]


def _is_visible(character: str) -> bool:
    """A letter, a digit or printable ASCII: nothing that any rule takes for a space, or that normalizing joins."""
    return character.isalnum() or "!" <= character <= "~"
