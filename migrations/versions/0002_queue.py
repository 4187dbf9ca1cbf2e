"""What the queue needs: columns of jobs and shards, workers, plan_pieces, and four views for people who write SQL.

A role that may read the views and nothing else (PostgreSQL; a view reads with its owner's rights):
    CREATE ROLE analyst LOGIN PASSWORD '...';
    GRANT SELECT ON job_progress, shard_attempts, row_errors_by_code, worker_status TO analyst;
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_VIEWS = ("job_progress", "shard_attempts", "row_errors_by_code", "worker_status")
_PERCENTILES = [
    f"{measure}_{label}"
    for measure in ("queue_wait_s", "time_to_first_token_s", "time_per_token_s")
    for label in ("p50", "p95", "p99")
]
# What the two databases write differently. Times are seconds since 1970 in the tables.
_WORDS = {
    "postgresql": {
        "now": "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)",
        "min": "least",
        "max": "greatest",
        "time": "to_timestamp({})",
        "pid": "split_part(a.owner, ':', 1)",
        "host": "split_part({}, '/', 1)",
        "owner_host": "split_part(a.owner, ':', 4)",
        "errors": "json_each_text(CAST(s.stats AS JSON) -> 'errors_by_code')",
        "models": "(SELECT string_agg(m.value ->> 'name', ', ') FROM json_array_elements(w.models) AS m(value))",
    },
    "sqlite": {
        "now": "((julianday('now') - 2440587.5) * 86400.0)",
        "min": "min",
        "max": "max",
        "time": "strftime('%Y-%m-%dT%H:%M:%fZ', {}, 'unixepoch')",
        "pid": "substr(a.owner, 1, instr(a.owner, ':') - 1)",
        "host": "substr({0}, 1, instr({0} || '/', '/') - 1)",
        "owner_host": "json_extract('[\"' || replace(a.owner, ':', '\",\"') || '\"]', '$[3]')",
        "errors": "json_each(s.stats, '$.errors_by_code')",
        "models": "(SELECT group_concat(json_extract(m.value, '$.name'), ', ') FROM json_each(w.models) AS m)",
    },
}


def _job_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("runner", sa.String(length=16), nullable=False, server_default="local"),
        sa.Column("columns", sa.JSON(), nullable=False, server_default="[]"),
        sa.Column("dtype", sa.String(length=16), nullable=False, server_default="auto"),
        sa.Column("priority", sa.SmallInteger(), nullable=False, server_default="1"),
        sa.Column("prefix_key", sa.String(length=32), nullable=True),
        sa.Column("idempotency_key", sa.String(length=255), nullable=True),
        sa.Column("not_before", sa.Double(), nullable=True),
        sa.Column("deadline_at", sa.Double(), nullable=True),
        *(sa.Column(name, sa.Double(), nullable=True) for name in _PERCENTILES),
        sa.Column("stopping_as", sa.String(length=16), nullable=True),
        sa.Column("plan_owner", sa.Text(), nullable=True),
        sa.Column("plan_lease_until", sa.Double(), nullable=True),
        sa.Column("on_complete", sa.Text(), nullable=True),
        sa.Column("notices_sent", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("notice_due_at", sa.Double(), nullable=True),
    ]


def upgrade() -> None:
    for column in _job_columns():
        op.add_column("jobs", column)
    op.create_index(op.f("ix_jobs_state_runner"), "jobs", ["state", "runner"], unique=False)
    op.create_index(op.f("ix_jobs_idempotency_key"), "jobs", ["idempotency_key"], unique=True)
    op.create_index(op.f("ix_jobs_notice_due_at"), "jobs", ["notice_due_at"], unique=False)
    op.add_column(
        "shards", sa.Column("strip_errors", sa.Boolean(), nullable=False, server_default=sa.false())
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.Column("models", sa.JSON(), nullable=False),
        sa.Column("num_shards", sa.BigInteger(), nullable=False),
        sa.Column("num_rows_in_flight", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("stopped_at", sa.Double(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_index(op.f("ix_workers_owner"), "workers", ["owner"], unique=False)
    op.create_table(
        "plan_pieces",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("piece_index", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("source_index", sa.BigInteger(), nullable=False),
        sa.Column("byte_offset", sa.BigInteger(), nullable=False),
        sa.Column("byte_size", sa.BigInteger(), nullable=False),
        sa.Column("ranges", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_plan_pieces_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "piece_index", name=op.f("pk_plan_pieces")),
    )
    words = _WORDS[op.get_context().dialect.name]
    op.execute(_job_progress(words))
    op.execute(_shard_attempts(words))
    op.execute(_row_errors_by_code(words))
    op.execute(_worker_status(words))


def downgrade() -> None:
    for view in reversed(_VIEWS):
        op.execute(f"DROP VIEW {view}")
    op.drop_table("plan_pieces")
    op.drop_index(op.f("ix_workers_owner"), table_name="workers")
    op.drop_table("workers")
    # Not in batch mode: that copies and drops the table, which foreign keys to it forbid.
    op.drop_column("shards", "strip_errors")
    op.drop_index(op.f("ix_jobs_notice_due_at"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_idempotency_key"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_state_runner"), table_name="jobs")
    for column in reversed(_job_columns()):
        op.drop_column("jobs", column.name)


def _time(words: dict[str, str], column: str) -> str:
    return f"{words['time'].format(column)} AS {column.partition('.')[2]}"


def _job_progress(words: dict[str, str]) -> str:
    """One row a job, in the numbers of `gristmill status`; jobs/status.py is the same in Python.

    The aggregate is grouped by the job's id, so that WHERE job_id = ... reads the shards of one job only.
    """
    times = ("created_at", "started_at", "finished_at", "deadline_at", "not_before")
    since_seen = f"{words['max']}({words['now']} - j.owner_seen_at, 0.0)"
    tokens = "(p.prompt_tokens + p.completion_tokens)"
    return f"""
    CREATE VIEW job_progress AS
    SELECT
        p.job_id, p.idempotency_key, p.state, p.message, p.model, p.runner, p.priority, p.inputs, p.output,
        p.rows, p.rows_done, p.completed, p.failed, p.skipped,
        p.rows - p.completed - p.failed - p.skipped AS not_run,
        p.prompt_tokens, p.completion_tokens, p.cached_tokens,
        CASE WHEN p.prompt_tokens > 0
            THEN CAST(p.cached_tokens AS DOUBLE PRECISION) / p.prompt_tokens END AS cached_share,
        CASE WHEN p.elapsed_s > 0 THEN {tokens} / p.elapsed_s END AS tokens_per_s,
        CASE WHEN p.elapsed_s > 0 THEN p.completion_tokens / p.elapsed_s END AS completion_tokens_per_s,
        CASE WHEN p.elapsed_s > 0 THEN p.rows_done / p.elapsed_s END AS rows_per_s,
        CASE WHEN p.finished_s IS NOT NULL THEN CASE WHEN p.state = 'completed' THEN 0.0 END
            WHEN p.elapsed_s > 0 AND p.rows_done > 0
            THEN (p.rows - p.rows_done) * p.elapsed_s / p.rows_done END AS eta_s,
        {", ".join(f"p.{name}" for name in _PERCENTILES)},
        p.shards_queued, p.shards_running, p.shards_done, p.shards_failed, p.shards_cancelled,
        {", ".join(f"p.{name}" for name in times)},
        p.elapsed_s
    FROM (
        SELECT
            j.id AS job_id, j.idempotency_key, j.state, j.message, j.model, j.runner,
            CASE j.priority WHEN 0 THEN 'high' WHEN 1 THEN 'normal' ELSE 'low' END AS priority,
            json_array_length(j.sources) AS inputs, j.output, j.num_rows AS rows,
            {words["min"]}(j.num_rows, CAST(coalesce(sum(
                CASE WHEN s.state = 'running' AND s.rows_reported > s.part_rows
                THEN s.rows_reported ELSE s.part_rows END), 0) AS BIGINT)) AS rows_done,
            {_sum("rows_completed", "completed")}, {_sum("rows_failed", "failed")},
            {_sum("rows_skipped", "skipped")}, {_sum("prompt_tokens")}, {_sum("completion_tokens")},
            {_sum("cached_tokens")},
            {", ".join(f"j.{name}" for name in _PERCENTILES)},
            {", ".join(_count(state) for state in ("queued", "running", "done", "failed", "cancelled"))},
            {", ".join(_time(words, f"j.{name}") for name in times)},
            j.finished_at AS finished_s,
            CASE
                WHEN j.runner = 'local' AND j.owner IS NULL AND j.active_s = 0
                THEN coalesce(
                    {words["max"]}(coalesce(j.finished_at, {words["now"]}) - j.started_at, 0.0), 0.0)
                WHEN j.owner_seen_at IS NULL OR j.finished_at IS NOT NULL THEN j.active_s
                ELSE j.active_s + {words["min"]}({since_seen}, 60.0)
            END AS elapsed_s
        FROM jobs j LEFT JOIN shards s ON s.job_id = j.id
        GROUP BY j.id
    ) p"""


def _sum(column: str, name: str | None = None) -> str:
    return f"CAST(coalesce(sum(s.{column}), 0) AS BIGINT) AS {name or column}"


def _count(state: str) -> str:
    return f"sum(CASE WHEN s.state = '{state}' THEN 1 ELSE 0 END) AS shards_{state}"


def _shard_attempts(words: dict[str, str]) -> str:
    """One row for each time that a process took a shard."""
    return f"""
    CREATE VIEW shard_attempts AS
    SELECT s.job_id, s.shard_index, a.fence,
        {words["pid"]} || '@' || {words["host"].format(words["owner_host"])} AS worker,
        a.outcome, a.message, a.rows_committed, {_time(words, "a.started_at")}, {_time(words, "a.ended_at")}
    FROM attempts a JOIN shards s ON s.id = a.shard_id"""


def _row_errors_by_code(words: dict[str, str]) -> str:
    """How many rows of a job ended in an error of each code; only shards with error rows are read."""
    return f"""
    CREATE VIEW row_errors_by_code AS
    SELECT s.job_id, e.key AS error_code, CAST(sum(CAST(e.value AS BIGINT)) AS BIGINT) AS rows
    FROM shards s, {words["errors"]} AS e
    WHERE s.rows_failed > 0
    GROUP BY s.job_id, e.key"""


def _worker_status(words: dict[str, str]) -> str:
    """One row a worker process; `lost` has said nothing for a minute, and did not say that it stops."""
    return f"""
    CREATE VIEW worker_status AS
    SELECT w.id AS worker_id, {words["host"].format("w.host")} AS host, w.pid,
        CASE WHEN w.stopped_at IS NOT NULL THEN 'stopped'
            WHEN w.seen_at < {words["now"]} - 60.0 THEN 'lost'
            WHEN w.num_shards > 0 THEN 'busy' ELSE 'idle' END AS state,
        {words["models"]} AS models, w.num_shards AS shards, w.num_rows_in_flight AS rows_in_flight, w.version,
        {_time(words, "w.started_at")}, {_time(words, "w.seen_at")}, w.message
    FROM workers w"""
