"""Token ids to text, all at once or as they come, with one rule for both: bytes first, then UTF-8.

A character whose bytes are spread over tokens appears when its last byte does; bytes that can't be UTF-8
become U+FFFD. The text of ids pushed one by one always equals the text of all of them together.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one growing sequence. token_bytes: id -> bytes, empty for tokens that are not shown."""

    __slots__ = ("_decoder", "_strip_space", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes], strip_space: bool) -> None:
        self._token_bytes = token_bytes
        self._strip_space = strip_space  # the first character, when a space, belongs to the tokenizer
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        data = self._token_bytes(token_id)
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never became complete."""
        return self._decoder.decode(b"", True)


def decode_all(detokenizer: Detokenizer, token_ids: Iterable[int]) -> str:
    """The whole text of a fresh detokenizer."""
    return "".join([*map(detokenizer.push, token_ids), detokenizer.finish()])
