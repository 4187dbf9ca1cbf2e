"""Which rows may have killed the engine, and in which order they go in again. Bookkeeping only.

First death: all rows that were in flight again, since it may have been chance. Second: in micro-batches, one
after the other. From then on the micro-batch that dies is halved, down to one row, which gets three tries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gristmill.engine.request import Request

MICRO_BATCH_ROWS = 16
SOLO_DEATHS = 3


@dataclass(slots=True)
class _Group:
    """Rows that are in the engine together. num_deaths: of the engine, while they were in it."""

    requests: dict[int, Request]
    num_deaths: int
    num_solo_deaths: int = 0


class CrashSearch:
    """Groups of rows; only the first one is in the engine, and no other row beside it."""

    def __init__(self) -> None:
        self._groups: deque[_Group] = deque()

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def present(self) -> list[Request]:
        """The rows that belong in the engine now."""
        return list(self._groups[0].requests.values()) if self._groups else []

    def blame(self, in_flight: Sequence[Request]) -> Request | None:
        """The engine died with these rows in it; returns the culprit once there is no other explanation."""
        if not self._groups:
            self._push([in_flight], 1, int(len(in_flight) == 1))
            return None
        group = self._groups.popleft()
        num_deaths = group.num_deaths + 1
        if len(in_flight) > 1:
            size = MICRO_BATCH_ROWS if num_deaths == 2 else (len(in_flight) + 1) // 2
            self._push([in_flight[i : i + size] for i in range(0, len(in_flight), size)], num_deaths)
            return None
        num_solo_deaths = group.num_solo_deaths + 1
        if num_solo_deaths >= SOLO_DEATHS:
            return in_flight[0]
        self._push([in_flight], num_deaths, num_solo_deaths)
        return None

    def discard(self, request_ids: Collection[int]) -> bool:
        """These rows are finished or given up. True when the first group is through: the next may go in."""
        before = self._groups[0] if self._groups else None
        for group in self._groups:
            for request_id in request_ids:
                group.requests.pop(request_id, None)
        self._groups = deque(group for group in self._groups if group.requests)
        return before is not None and not before.requests

    def _push(self, parts: Sequence[Sequence[Request]], num_deaths: int, num_solo_deaths: int = 0) -> None:
        groups = [_Group({r.request_id: r for r in part}, num_deaths, num_solo_deaths) for part in parts]
        self._groups.extendleft(reversed(groups))
