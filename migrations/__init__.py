"""Alembic revisions of the job database; jobs/database.py runs them."""
