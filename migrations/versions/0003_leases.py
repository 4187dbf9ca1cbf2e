"""How long a job's and a worker's last word counts stands in their rows; the views read it there.

A view's text is taken from the database with that one expression exchanged, and so keeps the rights that
people were given (PostgreSQL).
"""

from __future__ import annotations

import re

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_LITERAL = "60.0"
_VIEWS = ("job_progress", "worker_status")


def upgrade() -> None:
    for table in ("jobs", "workers"):
        op.add_column(table, sa.Column("lease_s", sa.Double(), nullable=False, server_default=_LITERAL))
    for view in _VIEWS:
        _exchange(view, re.escape(_LITERAL), "lease_s")


def downgrade() -> None:
    for view in _VIEWS:
        _exchange(view, r"\b([jw]\.)?lease_s\b", _LITERAL)
    for table in ("workers", "jobs"):
        op.drop_column(table, "lease_s")


def _exchange(view: str, before: str, after: str) -> None:
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        query = connection.scalar(sa.text(f"SELECT pg_get_viewdef('{view}'::regclass)"))
        create = f"CREATE OR REPLACE VIEW {view} AS {query}"
    else:
        create = connection.scalar(sa.text(f"SELECT sql FROM sqlite_master WHERE name = '{view}'"))
        op.execute(f"DROP VIEW {view}")
    changed, count = re.subn(before, after, create)
    assert count == 1, f"{before} stands {count} times in {view}"
    connection.exec_driver_sql(changed)
