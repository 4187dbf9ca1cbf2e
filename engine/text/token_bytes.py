"""The bytes that each token id stands for, by the decoder that tokenizer.json names.

Two kinds exist in the supported models: byte-level BPE, whose characters stand for bytes (GPT-2), and BPE
over text with U+2581 for a space and tokens like <0xF0> for single bytes (Llama 2, Mistral).
"""

from __future__ import annotations

import re
from typing import Any

import tokenizers

from gristmill.engine.errors import ModelRefused

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


class TokenBytes(dict[int, bytes]):
    """id -> bytes, filled as ids are asked for; special and unknown ids are empty."""

    def __init__(self, description: dict[str, Any], backend: tokenizers.Tokenizer, origin: str) -> None:
        super().__init__()
        steps = _steps(description.get("decoder"))
        kinds = {step["type"] for step in steps}
        if not kinds & {"ByteLevel", "Metaspace", "ByteFallback", "Replace"}:
            raise ModelRefused(
                f"{origin}: the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported;"
                " byte-level BPE or BPE with byte fallback is needed"
            )
        self._backend = backend
        self._from_char = _bytes_of_chars() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self.strips_leading_space = self._from_char is None and any(map(_strips_leading_space, steps))
        self.update(
            {item["id"]: b"" for item in description.get("added_tokens") or [] if item.get("special")}
        )

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        data = b"" if token is None else self._bytes_of(token)
        self[token_id] = data
        return data

    def _bytes_of(self, token: str) -> bytes:
        if self._from_char is not None:
            if all(char in self._from_char for char in token):
                return bytes(self._from_char[char] for char in token)
            return token.encode()  # an added token, kept as it is written
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE, " ").encode()


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The decoder's steps, sequences flattened."""
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _steps(inner)]
    return [decoder]


def _strips_leading_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return (
            step.get("prepend_scheme", "always") != "never"
            and step.get("add_prefix_space", True) is not False
        )
    return step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0


def _bytes_of_chars() -> dict[str, int]:
    """GPT-2's stand-ins: printable Latin-1 characters are themselves, the other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
