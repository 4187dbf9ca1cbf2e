"""Texts that are hard to tokenize, and chats made of one text, for tests only."""

from __future__ import annotations

from typing import Any

from gristmill.engine.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!  Two  spaces\n\n\tand a tab",
    "Đơn hàng 12345 của tôi bị trễ ba ngày rồi; xin hãy kiểm tra giúp.",
    "😀👩‍👩‍👧 naïve café ﬁ ½ 東京 العربية",
    "I'll can't WE'RE 3.14159 x=1;\r\n{}[]()<>",
    "a\u0302\u0323 \u00e2\u0323 combining",
]


def build_chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_batch([tokenizer.render_chat(build_chat(text))])[0].tolist()
