"""Stop strings: the text of a growing sequence, cut before the first stop string that becomes complete.

Works on characters, so a stop string may span tokens and its characters may span tokens too. The result
doesn't depend on how the text was cut into tokens: the stop string that ends first wins, then the longest.
"""

from __future__ import annotations

from typing import Protocol


class TokenDecoder(Protocol):
    """What StopChecker needs of a detokenizer."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class StopChecker:
    """Collects the text of one sequence and looks for its stop strings."""

    __slots__ = ("_detokenizer", "_max_length", "_pieces", "_stop", "_tail")

    def __init__(self, stop: tuple[str, ...], detokenizer: TokenDecoder) -> None:
        self._stop = tuple(text for text in stop if text)
        self._max_length = max(map(len, self._stop), default=0)
        self._detokenizer = detokenizer
        self._pieces: list[str] = []
        self._tail = ""  # the last characters, in which a stop string may have begun

    @property
    def text(self) -> str:
        """All complete characters so far."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str | None:
        """Add a token; returns the text before the stop string when one is now complete, else None."""
        return self._add(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """End the sequence; returns its text, cut if the last characters complete a stop string."""
        cut = self._add(self._detokenizer.finish())
        return self.text if cut is None else cut

    def _add(self, piece: str) -> str | None:
        if not piece:
            return None
        self._pieces.append(piece)
        if not self._stop:
            return None
        window = self._tail + piece
        found = [(start + len(stop), start) for stop in self._stop if (start := window.find(stop)) >= 0]
        if found:
            text = self.text
            return text[: len(text) - len(window) + min(found)[1]]
        self._tail = window[max(0, len(window) - self._max_length + 1) :]
        return None
