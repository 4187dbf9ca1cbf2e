"""The worker processes of the queue: what they offer, how busy they are, when they were last seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from gristmill.jobs.owner import Owner, is_dead
from gristmill.jobs.records import WorkerModel, WorkerRecord
from gristmill.jobs.store.database import Database
from gristmill.jobs.store.job_rows import clean_text
from gristmill.jobs.store.models import workers

# Of a WorkerRecord, those that are as its columns hold them.
_PLAIN_FIELDS = "version num_shards num_rows_in_flight started_at seen_at stopped_at message".split()


class Workers:
    """The worker processes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def register(self, worker_id: str, owner: Owner, models: Sequence[WorkerModel], version: str) -> None:
        """A worker has started, or was forgotten and is still there."""
        with self._database.write() as (connection, now):
            values = {
                "owner": owner.to_text(),
                "host": owner.host.partition("/")[0],
                "pid": owner.pid,
                "version": version,
                "models": [model._asdict() for model in models],
                "num_shards": 0,
                "num_rows_in_flight": 0,
                "started_at": now,
                "seen_at": now,
                "stopped_at": None,
                "message": None,
            }
            if not _change(connection, worker_id, values):
                connection.execute(insert(workers).values(id=worker_id, **values))

    def beat(
        self, worker_id: str, models: Sequence[WorkerModel], num_shards: int, num_rows_in_flight: int
    ) -> bool:
        """A worker still runs; False when the database does not know it: register it again."""
        with self._database.write() as (connection, now):
            values = {
                "models": [model._asdict() for model in models],
                "num_shards": num_shards,
                "num_rows_in_flight": num_rows_in_flight,
                "seen_at": now,
            }
            return _change(connection, worker_id, values)

    def stop(self, worker_id: str, message: str | None = None) -> None:
        """A worker ends; `message` says why where nobody asked for it."""
        text = None if message is None else clean_text(message)
        with self._database.write() as (connection, now):
            values = {
                "num_shards": 0,
                "num_rows_in_flight": 0,
                "stopped_at": now,
                "seen_at": now,
                "message": text,
            }
            _change(connection, worker_id, values)

    def load_all(self) -> list[WorkerRecord]:
        """All workers that are remembered, the newest first."""
        query = select(workers).order_by(workers.c.started_at.desc(), workers.c.id)
        with self._database.read() as (connection, now):
            return [_build_worker(row, now) for row in connection.execute(query)]

    def known_models(self) -> dict[str, set[str]]:
        """The models that workers offer now, by name; a name has several fingerprints where workers differ."""
        found: dict[str, set[str]] = {}
        for worker in self.load_all():
            if worker.state in ("busy", "idle"):
                for model in worker.models:
                    found.setdefault(model.name, set()).add(model.fingerprint)
        return found


def _change(connection: Connection, worker_id: str, values: Mapping[str, Any]) -> bool:
    change = update(workers).where(workers.c.id == worker_id).values(**values)
    return connection.execute(change).rowcount == 1


def _build_worker(row: Row[Any], now: float) -> WorkerRecord:
    owner = Owner.from_text(row.owner)
    return WorkerRecord(
        **{name: row._mapping[name] for name in _PLAIN_FIELDS},
        worker_id=row.id,
        owner=owner,
        state=_state(row, owner, now),
        models=tuple(WorkerModel(**model) for model in row.models),
    )


def _state(row: Row[Any], owner: Owner, now: float) -> str:
    if row.stopped_at is not None:
        return "stopped"
    if row.seen_at + row.lease_s < now or is_dead(owner):
        return "lost"
    return "busy" if row.num_shards else "idle"
