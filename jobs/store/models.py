"""The tables. Every time is seconds since 1970 in UTC: a float, the same in SQLite and PostgreSQL.

People who write SQL read the views of migrations/versions/0002_queue.py: job_progress, shard_attempts,
row_errors_by_code, worker_status. Changes go through jobs/store/store.py only.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
    column,
    table,
)

from gristmill.jobs.states import ShardState

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)
LEASE_S = 60.0  # how long the last word of a process counts
PERCENTILE_COLUMNS = [
    f"{measure}_{label}"
    for measure in ("queue_wait_s", "time_to_first_token_s", "time_per_token_s")
    for label in ("p50", "p95", "p99")
]
# SQLite numbers rows by itself only in an INTEGER primary key.
_RowId = BigInteger().with_variant(Integer(), "sqlite")

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("message", Text),
    Column("runner", String(16), nullable=False, default="local"),  # states.Runner
    Column("identity", String(64), nullable=False),  # "" until it is planned
    Column("fingerprint", String(64), nullable=False),  # "": the first claim pins that of its worker's model
    Column("model", Text, nullable=False),
    Column("output", Text, nullable=False),
    Column("spec", JSON, nullable=False),
    Column("sources", JSON, nullable=False),
    Column("columns", JSON, nullable=False, default=list),  # names of the input's columns; []: unknown
    Column("part_schema", LargeBinary, nullable=False),  # Arrow IPC; b"" until it is planned
    Column("max_tokens", BigInteger),
    Column("dtype", String(16), nullable=False, default="auto"),
    Column("priority", SmallInteger, nullable=False, default=1),  # 0 high, 1 normal, 2 low
    Column("prefix_key", String(32)),  # equal for jobs whose prompts begin alike
    Column("idempotency_key", String(255)),
    Column("not_before", Double),
    Column("deadline_at", Double),
    Column("num_rows", BigInteger, nullable=False),
    Column("num_shards", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("finished_at", Double),
    Column("active_s", Double, nullable=False, default=0.0),  # while a process worked on it
    Column("stats", Text),  # JobStats of the shards that are done
    *(Column(name, Double) for name in PERCENTILE_COLUMNS),  # of `stats`, for people who write SQL
    Column("owner", Text),  # the local run that holds the job
    Column("owner_seen_at", Double),  # when a process last said that it works on the job
    Column("lease_s", Double, nullable=False, default=LEASE_S),  # of owner_seen_at
    Column("stopping_as", String(16)),  # while cancelling: the state that follows
    Column("plan_owner", Text),
    Column("plan_lease_until", Double),
    Column("on_complete", Text),  # TASK or TASK@QUEUE
    Column("notices_sent", BigInteger, nullable=False, default=0),
    Column("notice_due_at", Double),  # None: nothing to send
    Column("finalize_fence", BigInteger, nullable=False, default=0),
    Column("finalize_owner", Text),
    Column("finalize_lease_until", Double),
    Index(None, "output"),
    Index(None, "created_at"),
    Index(None, "fingerprint", "created_at"),
    Index(None, "state", "runner"),
    Index(None, "idempotency_key", unique=True),
    Index(None, "notice_due_at"),
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
    Column("strip_errors", Boolean, nullable=False, default=False),  # the next attempt redoes the error rows
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

workers = Table(
    "workers",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("owner", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("version", String(64), nullable=False),
    Column("models", JSON, nullable=False),  # [{"name", "fingerprint", "dtype", "is_loaded"}]
    Column("num_shards", BigInteger, nullable=False, default=0),
    Column("num_rows_in_flight", BigInteger, nullable=False, default=0),
    Column("started_at", Double, nullable=False),
    Column("seen_at", Double, nullable=False),
    Column("lease_s", Double, nullable=False, default=LEASE_S),  # of seen_at
    Column("stopped_at", Double),
    Column("message", Text),  # why it stopped, where that was not asked for
    Index(None, "owner"),
)

# The view of the figures that SQL alone can tell; its times, in the database's own words, are for people.
job_progress = table(
    "job_progress",
    *(column(name) for name in ("job_id", "rows", "rows_done", "completed", "failed", "skipped", "not_run")),
    *(column(name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "cached_share")),
    *(column(name) for name in ("tokens_per_s", "completion_tokens_per_s", "rows_per_s")),
    *(column(name) for name in ("eta_s", "elapsed_s")),
    *(column(f"shards_{state}") for state in sorted(ShardState)),
)

plan_pieces = Table(
    "plan_pieces",
    metadata,
    Column("job_id", String(64), ForeignKey("jobs.id"), primary_key=True),
    Column("piece_index", BigInteger, primary_key=True, autoincrement=False),
    Column("source_index", BigInteger, nullable=False),
    Column("byte_offset", BigInteger, nullable=False),
    Column("byte_size", BigInteger, nullable=False),  # 0: the whole source
    Column("ranges", Text),  # JSON of what the piece was cut into; None: not yet
)
