"""The four tables. Every time is seconds since 1970 in UTC: a float, the same in SQLite and PostgreSQL.

Read one in SQL as datetime(created_at, 'unixepoch') or to_timestamp(created_at). Changes go through
jobs/store.py only.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)
# SQLite numbers rows by itself only in an INTEGER primary key.
_RowId = BigInteger().with_variant(Integer(), "sqlite")

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("message", Text),
    Column("identity", String(64), nullable=False),
    Column("fingerprint", String(64), nullable=False),
    Column("model", Text, nullable=False),
    Column("output", Text, nullable=False),
    Column("spec", JSON, nullable=False),
    Column("sources", JSON, nullable=False),
    Column("part_schema", LargeBinary, nullable=False),  # Arrow IPC
    Column("max_tokens", BigInteger),
    Column("num_rows", BigInteger, nullable=False),
    Column("num_shards", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("finished_at", Double),
    Column("active_s", Double, nullable=False, default=0.0),  # while a process held it
    Column("stats", Text),  # JobStats of the shards that are done
    Column("owner", Text),  # the local run that holds the job
    Column("owner_seen_at", Double),
    Column("finalize_fence", BigInteger, nullable=False, default=0),
    Column("finalize_owner", Text),
    Column("finalize_lease_until", Double),
    Index(None, "output"),
    Index(None, "created_at"),
    Index(None, "fingerprint", "created_at"),
)

shards = Table(
    "shards",
    metadata,
    Column("id", _RowId, primary_key=True),
    Column("job_id", String(64), ForeignKey("jobs.id"), nullable=False),
    Column("shard_index", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("message", Text),
    Column("source_index", BigInteger, nullable=False),
    Column("first_row", BigInteger, nullable=False),
    Column("num_rows", BigInteger, nullable=False),
    Column("num_records", BigInteger, nullable=False),
    Column("byte_offset", BigInteger, nullable=False),
    Column("byte_size", BigInteger, nullable=False),
    Column("fence", BigInteger, nullable=False, default=0),  # raised by every claim
    Column("owner", Text),
    Column("lease_until", Double),
    Column("crash_count", BigInteger, nullable=False, default=0),
    Column("rows_reported", BigInteger, nullable=False, default=0),  # by heartbeats of this attempt
    Column("part_path", Text),  # part-00042.parquet
    Column("part_attempt", Text),  # the committed attempt's file
    Column("part_rows", BigInteger, nullable=False, default=0),
    Column("part_bytes", BigInteger, nullable=False, default=0),
    Column("part_sha256", String(64)),
    Column("published_at", Double),  # when part_attempt was renamed to part_path
    Column("rows_completed", BigInteger, nullable=False, default=0),
    Column("rows_failed", BigInteger, nullable=False, default=0),
    Column("rows_skipped", BigInteger, nullable=False, default=0),
    Column("prompt_tokens", BigInteger, nullable=False, default=0),
    Column("completion_tokens", BigInteger, nullable=False, default=0),
    Column("cached_tokens", BigInteger, nullable=False, default=0),
    Column("stats", Text),  # JobStats
    Column("started_at", Double),
    Column("finished_at", Double),
    UniqueConstraint("job_id", "shard_index"),
    Index(None, "job_id", "state", "shard_index"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", _RowId, primary_key=True),
    Column("shard_id", _RowId, ForeignKey("shards.id"), nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("owner", Text, nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("message", Text),
    Column("rows_committed", BigInteger, nullable=False, default=0),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double),
    UniqueConstraint("shard_id", "fence"),
)

events = Table(
    "events",
    metadata,
    Column("id", _RowId, primary_key=True),
    Column("job_id", String(64), ForeignKey("jobs.id"), nullable=False),
    Column("at", Double, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("detail", JSON, nullable=False),
    Index(None, "job_id", "id"),
)
