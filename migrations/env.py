"""What alembic runs: the revisions over the connection that jobs/store/database.py hands it, in its transaction."""

from __future__ import annotations

from alembic import context

from gristmill.jobs.store.models import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite can't ALTER most things
)
with context.begin_transaction():
    context.run_migrations()
