"""A job that an earlier version began and was killed at is finished by this one; its finished rows are not run again.

old_job/ holds what that version (its schema 0002) left: the rows of its tables, and one of three parts.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, create_engine, func, insert, select

from examples.cluster.servers import PostgresServer
from gristmill.jobs.identity import job_identity
from gristmill.jobs.input.sources import load_sources
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.store.database import migrate_database
from gristmill.worker.cli.main import run_cli

OLD_JOB = Path(__file__).parent / "old_job"
OLD_SCHEMA = "0002"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.url(server.create_database())


def load_tables(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The old version's rows, with its paths made those of `folder`."""
    text = (OLD_JOB / "tables.json").read_text().replace("{folder}", str(folder))
    tables: dict[str, list[dict[str, Any]]] = json.loads(
        text, object_hook=lambda each: base64.b64decode(each["base64"]) if "base64" in each else each
    )
    (job,) = tables["jobs"]
    source = folder / "in.jsonl"
    lines = [json.dumps({"custom_id": f"c{i}", "text": f"row {i}"}) + "\n" for i in range(60)]
    source.write_text("".join(lines))
    version = int(job["sources"][0]["version"])
    os.utime(source, ns=(version, version))
    # Only the paths differ from the old version's hash: tests/jobs/test_identity.py holds the rule fixed.
    job["identity"] = job_identity(
        load_sources([str(source)]), JobSpec.model_validate(job["spec"]), job["fingerprint"]
    )
    return tables


def write_tables(url: str, tables: dict[str, list[dict[str, Any]]]) -> None:
    migrate_database(url, OLD_SCHEMA)
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    metadata = MetaData()
    metadata.reflect(engine)
    with engine.begin() as connection:
        for name, rows in tables.items():
            for row in rows:
                connection.execute(insert(metadata.tables[name]).values(row))
            if engine.dialect.name == "postgresql" and isinstance(rows[0]["id"], int):
                sequence = func.pg_get_serial_sequence(name, "id")
                connection.execute(select(func.setval(sequence, max(row["id"] for row in rows))))
    engine.dispose()


@pytest.mark.parametrize("command", ["run", "resume"])
def test_a_job_begun_by_the_old_version_is_finished(
    url: str, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = load_tables(tmp_path)
    write_tables(url, tables)
    output = tmp_path / "out"
    output.mkdir()
    shutil.copy(OLD_JOB / "part-00000.jsonl", output)
    job_id = tables["jobs"][0]["id"]
    words = ["resume", job_id]
    if command == "run":
        words = ["run", f"{tmp_path}/in.jsonl", "--output", str(output), "--model", "null:?delay_ms=50"]
        words += ["--prompt", "{{ text }}", "--max-tokens", "4", "--shard-rows", "20"]
        words += ["--output-format", "jsonl"]
    code = run_cli([*words, "--database-url", url])
    out, err = capsys.readouterr()
    assert (code, out.split()[0]) == (0, job_id), err
    assert f"{job_id} goes on: 20 of 60 rows are done" in err
    assert (output / "part-00000.jsonl").read_bytes() == (OLD_JOB / "part-00000.jsonl").read_bytes()
    parts = sorted(output.glob("part-*"))
    rows = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [f"c{i}" for i in range(60)]
    assert json.loads((output / "_manifest.json").read_text())["job_id"] == job_id
