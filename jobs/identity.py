"""Which runs are the same job, and which seed a sample has: hashes of what decides a text, and of no more."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from gristmill.jobs.source import Source
from gristmill.jobs.spec import JobSpec

IDENTITY_VERSION = 1  # raise it when equal orders begin to give other texts


def job_identity(sources: Sequence[Source], spec: JobSpec, fingerprint: str) -> str:
    """32 hex digits, equal if the sources, all fields that can change a text, and the model are equal."""
    content: dict[str, Any] = {
        "version": IDENTITY_VERSION,
        "sources": sorted([source.uri, source.size_bytes, source.version] for source in sources),
        "spec": spec.identity_fields(),
        "fingerprint": fingerprint,
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def sample_seed(job_seed: int, source_index: int, row_index: int, sample_index: int = 0) -> int:
    """63 bits that depend on the arguments only: retries, resharding and other workers draw the same."""
    text = f"{job_seed}:{source_index}:{row_index}:{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
