"""What chaos tests have inside their workers' processes (inside/sitecustomize.py): a machine's name, a log of rows.

The log tells which rows each engine process began, so that a test can count what was computed more than once.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.integration.worker_process import ROOT

INSIDE = Path(__file__).parent / "inside"


@dataclass(frozen=True, slots=True)
class RowRun:
    """A row that an engine began. `row` is its number in an input of Cluster.write_rows, -1 for other prompts."""

    at: float
    host: str
    pid: int
    text: str

    @property
    def row(self) -> int:
        found = re.search(r" number (\d+)", self.text)
        return int(found[1]) if found else -1


class Devices:
    """The devices of one test's workers."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "rows.log"
        self._illness = folder / "ill"
        self._num_hosts = 0

    def environment(self, host: str | None = None) -> dict[str, str]:
        """For a worker on a machine of its own."""
        self._num_hosts += 1
        path = [str(INSIDE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "PYTHONPATH": os.pathsep.join(path),
            "TEST_HOST": host or f"machine-{self._num_hosts}",
            "TEST_ROW_LOG": str(self._log),
            "TEST_ILLNESS": str(self._illness),
        }

    def fall_ill(self) -> None:
        """From now on every engine dies of whatever it is given."""
        self._illness.touch()

    def recover(self) -> None:
        self._illness.unlink()

    @property
    def log_size(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def runs(self, since: int = 0) -> list[RowRun]:
        """The rows that were begun, in order; `since` is a log_size of earlier."""
        if not self._log.exists():
            return []
        lines = self._log.read_bytes()[since:].splitlines()
        return [RowRun(*json.loads(line)) for line in lines]


def count_redone(runs: Sequence[RowRun]) -> Counter[int]:
    """By engine process: how many of the rows that it began some process had to begin again later."""
    last = {run.row: position for position, run in enumerate(runs)}
    return Counter(run.pid for position, run in enumerate(runs) if position != last[run.row])


def first_run(runs: Iterable[RowRun], host: str, after: float) -> RowRun | None:
    """The machine's first row after that time."""
    return next((run for run in runs if run.host == host and run.at > after), None)
