"""The tokenizer of the engine without weights: a byte is a token, and 256 ends a text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from gristmill.engine.errors import ChatTemplateError
from gristmill.engine.text.detokenizer import Detokenizer, decode_all

NULL_EOS = 256
_BYTES = tuple(bytes([i]) for i in range(256))


class NullTokenizer:
    """Same methods as ModelTokenizer; no BOS and no chat template."""

    vocab_size = 257
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = (NULL_EOS,)
    has_chat_template = False

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        """Always raises ChatTemplateError: there is no template."""
        raise ChatTemplateError("this model has no chat template")

    def render_text(self, text: str) -> str:
        """The text itself: it can't spell a control token."""
        return text

    def encode_batch(self, texts: list[str]) -> list[array[int]]:
        """The UTF-8 bytes of each text as ids."""
        return [array("I", list(text.encode())) for text in texts]

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of these ids."""
        return decode_all(self.detokenizer(), token_ids)

    def detokenizer(self) -> Detokenizer:
        """A decoder of ids as they come."""
        return Detokenizer(lambda token_id: _BYTES[token_id] if token_id < 256 else b"", strip_space=False)
