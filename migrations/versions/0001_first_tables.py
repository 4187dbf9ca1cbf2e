"""The first tables: jobs, shards, attempts, events."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("identity", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("output", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("sources", sa.JSON(), nullable=False),
        sa.Column("part_schema", sa.LargeBinary(), nullable=False),
        sa.Column("max_tokens", sa.BigInteger(), nullable=True),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("num_shards", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("active_s", sa.Double(), nullable=False),
        sa.Column("stats", sa.Text(), nullable=True),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("owner_seen_at", sa.Double(), nullable=True),
        sa.Column("finalize_fence", sa.BigInteger(), nullable=False),
        sa.Column("finalize_owner", sa.Text(), nullable=True),
        sa.Column("finalize_lease_until", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index(op.f("ix_jobs_created_at"), "jobs", ["created_at"], unique=False)
    op.create_index(
        op.f("ix_jobs_fingerprint_created_at"), "jobs", ["fingerprint", "created_at"], unique=False
    )
    op.create_index(op.f("ix_jobs_output"), "jobs", ["output"], unique=False)
    op.create_table(
        "events",
        sa.Column("id", _ROW_ID, nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id_jobs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_job_id_id"), "events", ["job_id", "id"], unique=False)
    op.create_table(
        "shards",
        sa.Column("id", _ROW_ID, nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("shard_index", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("source_index", sa.BigInteger(), nullable=False),
        sa.Column("first_row", sa.BigInteger(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("num_records", sa.BigInteger(), nullable=False),
        sa.Column("byte_offset", sa.BigInteger(), nullable=False),
        sa.Column("byte_size", sa.BigInteger(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.Column("crash_count", sa.BigInteger(), nullable=False),
        sa.Column("rows_reported", sa.BigInteger(), nullable=False),
        sa.Column("part_path", sa.Text(), nullable=True),
        sa.Column("part_attempt", sa.Text(), nullable=True),
        sa.Column("part_rows", sa.BigInteger(), nullable=False),
        sa.Column("part_bytes", sa.BigInteger(), nullable=False),
        sa.Column("part_sha256", sa.String(length=64), nullable=True),
        sa.Column("published_at", sa.Double(), nullable=True),
        sa.Column("rows_completed", sa.BigInteger(), nullable=False),
        sa.Column("rows_failed", sa.BigInteger(), nullable=False),
        sa.Column("rows_skipped", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("stats", sa.Text(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_shards_job_id_jobs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_shards")),
        sa.UniqueConstraint("job_id", "shard_index", name=op.f("uq_shards_job_id_shard_index")),
    )
    op.create_index(
        op.f("ix_shards_job_id_state_shard_index"), "shards", ["job_id", "state", "shard_index"], unique=False
    )
    op.create_table(
        "attempts",
        sa.Column("id", _ROW_ID, nullable=False),
        sa.Column("shard_id", _ROW_ID, nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("rows_committed", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["shard_id"], ["shards.id"], name=op.f("fk_attempts_shard_id_shards")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("shard_id", "fence", name=op.f("uq_attempts_shard_id_fence")),
    )


def downgrade() -> None:
    op.drop_table("attempts")
    op.drop_index(op.f("ix_shards_job_id_state_shard_index"), table_name="shards")
    op.drop_table("shards")
    op.drop_index(op.f("ix_events_job_id_id"), table_name="events")
    op.drop_table("events")
    op.drop_index(op.f("ix_jobs_output"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_fingerprint_created_at"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_created_at"), table_name="jobs")
    op.drop_table("jobs")
