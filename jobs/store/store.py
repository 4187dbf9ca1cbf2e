"""The job database, one attribute a subject; who needs one subject only is handed that one.

Every change of a state is a conditional UPDATE, so two callers never both believe that they made it.
"""

from __future__ import annotations

from collections.abc import Callable
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


class Store:
    """All that is asked of the job database. Safe for several threads; close it at the end."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.jobs = Jobs(database)
        self.submissions = Submissions(database)
        self.plans = Plans(database)
        self.pieces = Pieces(database)
        self.claims = Claims(database)
        self.shards = Shards(database)
        self.finalizing = Finalizing(database)
        self.ends = Ends(database)
        self.notices = Notices(database)
        self.workers = Workers(database)

    def close(self) -> None:
        """Closes all connections."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_store(url: str, clock: Callable[[], float] | None = None, lease_s: float = LEASE_S) -> Store:
    """The store of a database, its schema migrated; `clock` replaces the database's time in tests."""
    return Store(Database(connect_database(url), clock, lease_s))
