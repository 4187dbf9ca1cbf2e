"""Alembic revisions of the job database; jobs/store/database.py runs them."""
