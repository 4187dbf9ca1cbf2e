"""What the tests of whole local jobs share: inputs, a run in this process, the output read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.jobs.owner import current_owner
from gristmill.jobs.plan.order import Order
from gristmill.jobs.records import JobRecord
from gristmill.jobs.source import Plan
from gristmill.jobs.spec import parse_spec
from gristmill.jobs.store.database import database_url
from gristmill.jobs.store.store import Store, open_store
from gristmill.worker.cli.main import run_cli
from gristmill.worker.local.run import resume_local, run_local
from gristmill.worker.serve.stop_signals import StopSignals
from gristmill.worker.show.progress import Progress

Invoke = Callable[..., tuple[int, str, str]]


@dataclass
class RecordingDisplay:
    """A display that keeps what it is told; `on_update` may act on it."""

    on_update: Callable[[Progress], None] | None = None
    updates: list[Progress] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    job_id: str = ""
    is_stopped: bool = False

    def start(self, total_rows: int, done_rows: int, job_id: str = "") -> None:
        self.job_id = job_id

    def update(self, progress: Progress) -> None:
        self.updates.append(progress)
        if self.on_update is not None:
            self.on_update(progress)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stop(self) -> None:
        self.is_stopped = True

    def rows_done(self) -> int:
        return self.updates[-1].rows_done if self.updates else 0


class JobKit:
    """Local jobs below one temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "out"

    def write_jsonl(self, rows: Iterable[Mapping[str, Any] | str], name: str = "in.jsonl") -> Path:
        """One line a row; a string is written as it is."""
        path = self.folder / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    def write_parquet(
        self, columns: Mapping[str, Any], name: str = "in.parquet", group_rows: int = 100
    ) -> Path:
        path = self.folder / name
        pq.write_table(pa.table(dict(columns)), path, row_group_size=group_rows)
        return path

    def run(
        self,
        source: Path,
        display: RecordingDisplay | None = None,
        signals: StopSignals | None = None,
        **fields: Any,
    ) -> int:
        """The exit code of a run over `source`."""
        order = {
            "input": [str(source)],
            "output": str(self.output),
            "model": "null:",
            "max_tokens": 16,
            **fields,
        }
        return run_local(parse_spec(order), None, display or RecordingDisplay(), signals)

    def resume(self, reference: str, display: RecordingDisplay | None = None, retry: bool = False) -> int:
        return resume_local(reference, None, display or RecordingDisplay(), retry=retry)

    def rows(self, output: Path | None = None) -> list[dict[str, Any]]:
        """All output rows, in the order in which the folder holds them."""
        parts = sorted((output or self.output).glob("part-*.parquet"))
        return [row for part in parts for row in pq.ParquetFile(part).read().to_pylist()]

    def new_display(self, on_update: Callable[[Progress], None] | None = None) -> RecordingDisplay:
        return RecordingDisplay(on_update)

    def store(self) -> Store:
        return open_store(database_url(None))


def begin_run(store: Store, order: Order, plan: Plan) -> JobRecord:
    """A job of this process that is in progress."""
    job = store.submissions.submit_own(order.spec, current_owner(), order.fingerprint, order.identity)
    store.plans.start(job.job_id, order.sources, order.columns, plan, order.part_schema, order.identity)
    return job


@pytest.fixture
def kit(tmp_path: Path) -> JobKit:
    return JobKit(tmp_path)


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Run a command in this process: exit code, stdout, stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        code = run_cli([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
