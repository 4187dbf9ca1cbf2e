"""What the tests of the store share: a database with a clock of its own, and an output folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.storage import LocalStorage, open_storage
from jobs.store import Store, open_store
from tests.jobs.cases import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/jobs.db", clock) as opened:
        yield opened


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def storage(out: Path) -> LocalStorage:
    return open_storage(str(out))
