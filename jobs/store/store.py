"""The job database, one attribute a subject; who needs one subject only is handed that one.

Every change of a state is a conditional UPDATE, so two callers never both believe that they made it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from gristmill.jobs.store.claims import Claims
from gristmill.jobs.store.database import Database, connect_database
from gristmill.jobs.store.ends import Ends
from gristmill.jobs.store.finalizing import Finalizing
from gristmill.jobs.store.jobs import Jobs
from gristmill.jobs.store.models import LEASE_S
from gristmill.jobs.store.notices import Notices
from gristmill.jobs.store.pieces import Pieces
from gristmill.jobs.store.plans import Plans
from gristmill.jobs.store.shards import Shards
from gristmill.jobs.store.submissions import Submissions
from gristmill.jobs.store.workers import Workers


@dataclass(frozen=True, slots=True)
class Store:
    """All that is asked of the job database. Safe for several threads; close it at the end."""

    database: Database
    jobs: Jobs
    submissions: Submissions
    plans: Plans
    pieces: Pieces
    claims: Claims
    shards: Shards
    finalizing: Finalizing
    ends: Ends
    notices: Notices
    workers: Workers

    def close(self) -> None:
        """Closes all connections."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_store(url: str, clock: Callable[[], float] | None = None, lease_s: float = LEASE_S) -> Store:
    """The store of a database, its schema migrated; `clock` replaces the database's time in tests."""
    return build_store(Database(connect_database(url), clock, lease_s))


def build_store(database: Database) -> Store:
    """The store's subjects over one database."""
    return Store(
        database=database,
        jobs=Jobs(database),
        submissions=Submissions(database),
        plans=Plans(database),
        pieces=Pieces(database),
        claims=Claims(database),
        shards=Shards(database),
        finalizing=Finalizing(database),
        ends=Ends(database),
        notices=Notices(database),
        workers=Workers(database),
    )
