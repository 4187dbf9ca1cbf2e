"""Open readers kept between shards, so that reading shard k+1 after shard k does not start its file again.

One small cache per process; a cursor is in the cache or in use by one reader, never both.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class Cursor(Protocol):
    """An open reader at some position of a file."""

    def close(self) -> None:
        """Closes the file."""


CursorT = TypeVar("CursorT", bound=Cursor)


class CursorCache(Generic[CursorT]):
    """Cursors by (file, version, position); the least recently kept are closed beyond `max_cursors`."""

    def __init__(self, max_cursors: int) -> None:
        self._max_cursors = max_cursors
        self._cursors: OrderedDict[tuple[object, ...], CursorT] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, key: tuple[object, ...]) -> CursorT | None:
        """The cursor at `key`, now the caller's; None when there is none."""
        with self._lock:
            return self._cursors.pop(key, None)

    def keep(self, key: tuple[object, ...], cursor: CursorT) -> None:
        """Gives a cursor back, for whoever reads on from `key`."""
        with self._lock:
            evicted = [self._cursors.pop(key)] if key in self._cursors else []
            self._cursors[key] = cursor
            while len(self._cursors) > self._max_cursors:
                evicted.append(self._cursors.popitem(last=False)[1])
        for old in evicted:
            old.close()
