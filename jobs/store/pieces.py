"""Plans of large inputs, made in pieces by several workers. Whoever saves the last piece starts the job.

A piece has no lease: it may be planned twice, and is saved once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Row, exists, insert, select, update

from gristmill.jobs.records import LoadedPiece, PieceRecord
from gristmill.jobs.source import PlanPiece, Source
from gristmill.jobs.states import JobState
from gristmill.jobs.store.database import Database
from gristmill.jobs.store.job_rows import belongs_to, change_job, change_jobs, lock_validating, plan_values
from gristmill.jobs.store.models import jobs, plan_pieces

PIECES_AGAIN_S = 10.0  # after so long without a saved piece, the messages are taken for lost


class Pieces:
    """The pieces of a large plan."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save_all(
        self,
        job_id: str,
        sources: Sequence[Source],
        columns: Sequence[str],
        part_schema: bytes,
        identity: str,
        pieces: Sequence[PlanPiece],
    ) -> bool:
        """Keeps what the pieces' planners need; False when the job has pieces or is not to be planned."""
        with self._database.write() as (connection, now):
            if lock_validating(connection, job_id) is None or has_pieces(connection, job_id):
                return False
            rows = [
                {"job_id": job_id, "piece_index": index, **asdict(piece)}
                for index, piece in enumerate(pieces)
            ]
            connection.execute(insert(plan_pieces), rows)
            values = plan_values(sources, columns, part_schema, identity)
            change_job(connection, job_id, values | _until_again(now))
            return True

    def load(self, job_id: str, piece_index: int) -> LoadedPiece | None:
        """A piece to plan; None when the job is past planning, or never had that piece."""
        piece = plan_pieces.c.job_id == job_id, plan_pieces.c.piece_index == piece_index
        query = select(plan_pieces, jobs.c.sources).join(jobs, jobs.c.id == plan_pieces.c.job_id)
        with self._database.read() as (connection, _):
            row = connection.execute(query.where(*piece, jobs.c.state == JobState.VALIDATING)).one_or_none()
        if row is None:
            return None
        return LoadedPiece(Source(**row.sources[row.source_index]), _build_piece(row))

    def save(self, job_id: str, piece_index: int, ranges: str) -> bool:
        """Keeps the ranges of one piece; True when all pieces have theirs, and the job can start."""
        with self._database.write() as (connection, now):
            if lock_validating(connection, job_id) is None:  # of two last pieces one must see the other
                return False
            empty = plan_pieces.c.job_id == job_id, plan_pieces.c.ranges.is_(None)
            change = update(plan_pieces).where(*empty, plan_pieces.c.piece_index == piece_index)
            connection.execute(change.values(ranges=ranges))
            change_job(connection, job_id, {"plan_lease_until": now + PIECES_AGAIN_S})
            is_left = connection.scalar(select(exists().where(*empty)))
            return not is_left and has_pieces(connection, job_id)

    def load_all(self, job_id: str) -> list[PieceRecord]:
        """All pieces of a plan, in input order."""
        query = select(plan_pieces).where(plan_pieces.c.job_id == job_id)
        with self._database.read() as (connection, _):
            return [
                _build_piece(row) for row in connection.execute(query.order_by(plan_pieces.c.piece_index))
            ]

    def unplanned(self, job_id: str) -> list[int]:
        """The indexes of the pieces without ranges."""
        return [piece.piece_index for piece in self.load_all(job_id) if piece.ranges is None]

    def waiting(self) -> list[tuple[str, int]]:
        """(job, piece) of plans that stand still: the caller sends their messages, no other one does for a while.

        Where all pieces have ranges and the job was not started (its starter died), its last piece stands
        for that: it has ranges, and whoever gets it starts the job.
        """
        cut = exists().where(plan_pieces.c.job_id == jobs.c.id)
        still = lambda now: [*is_unplanned(), cut, jobs.c.plan_lease_until < now]  # noqa: E731
        found: list[tuple[str, int]] = []
        for job_id in change_jobs(self._database, still, _send_again):
            pieces = self.load_all(job_id)
            unplanned = [piece for piece in pieces if piece.ranges is None]
            found += [(job_id, piece.piece_index) for piece in unplanned or pieces[-1:]]
        return found


def is_unplanned() -> list[Any]:
    """The conditions for a submitted job whose planning is not over."""
    return [jobs.c.state == JobState.VALIDATING, belongs_to(None)]


def _until_again(now: float) -> dict[str, Any]:
    return {"plan_owner": None, "plan_lease_until": now + PIECES_AGAIN_S}


def _send_again(connection: Connection, job_id: str, now: float) -> bool:
    """Whether the caller is the one who sends a job's pieces again."""
    return change_job(connection, job_id, _until_again(now), *is_unplanned(), jobs.c.plan_lease_until < now)


def has_pieces(connection: Connection, job_id: str) -> bool:
    """Whether the job is planned in pieces."""
    return bool(connection.scalar(select(exists().where(plan_pieces.c.job_id == job_id))))


def _build_piece(row: Row[Any]) -> PieceRecord:
    return PieceRecord(
        row.job_id, row.piece_index, row.source_index, row.byte_offset, row.byte_size, row.ranges
    )
