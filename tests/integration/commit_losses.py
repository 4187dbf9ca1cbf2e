"""Loses the replies to chosen COMMITs of PostgreSQL: the transaction counts, and its author never hears of it."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter

# By what only such a transaction says, in its SQL; the first that is found.
KINDS = {
    "claim": rb"INSERT INTO attempts",
    "commit": rb"UPDATE shards SET [^\0]*part_attempt=",
    "publish": rb"UPDATE shards SET [^\0]*published_at=",
    "end": rb"UPDATE jobs SET [^\0]*finished_at=coalesce",
    "finalize": rb"UPDATE jobs SET [^\0]*finalize_lease_until=",
    "heartbeat": rb"UPDATE shards SET [^\0]*lease_until=",
}
_PATTERNS = {kind: re.compile(sql) for kind, sql in KINDS.items()}
_PREPARED = re.compile(rb"(_pg3_\d+)\0((?:SELECT|INSERT|UPDATE|DELETE)[^\0]*)\0")
_NAME = re.compile(rb"_pg3_\d+")


class CommitLosses:
    """For TcpProxy.loses_reply_to, which asks from one thread for each connection.

    Lost are the first of each kind, so that rare ones are met too, and `share` of the others.
    """

    def __init__(self, share: float, seed: int = 0) -> None:
        self.share = share
        self.seen: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._connection = threading.local()

    def __call__(self, chunk: bytes) -> bool:
        prepared = self._connection.__dict__.setdefault("prepared", {})
        prepared.update(_PREPARED.findall(chunk))
        said = self._connection.__dict__.get("said", b"") + chunk
        said += b"".join(prepared.get(name, b"") for name in _NAME.findall(chunk))
        is_end = b"COMMIT\0" in chunk or b"ROLLBACK\0" in chunk
        self._connection.said = b"" if is_end else said
        return b"COMMIT\0" in chunk and self._choose(said)

    def _choose(self, said: bytes) -> bool:
        kind = next((kind for kind, sql in _PATTERNS.items() if sql.search(said)), None)
        if kind is None:
            return False
        with self._lock:
            self.seen[kind] += 1
            is_chosen = self.seen[kind] == 1 or self._chance.random() < self.share
            self.lost[kind] += is_chosen
        return is_chosen
