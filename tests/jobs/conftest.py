"""What the tests of the store share: a database of either kind with a clock of its own, and an output folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine, event

from examples.cluster.servers import PostgresServer
from gristmill.jobs.storage.folder import Storage, open_storage
from gristmill.jobs.storage.s3.reader import S3File
from gristmill.jobs.store.database import Database, connect_database
from gristmill.jobs.store.models import metadata
from gristmill.jobs.store.store import Store
from tests.jobs.cases import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def _postgres_with_tables(postgres_server: PostgresServer) -> str:
    """The URL of a migrated database that the tests empty after themselves: to make one takes ten times as long."""
    url = postgres_server.url(postgres_server.create_database())
    connect_database(url).dispose()
    return url


@pytest.fixture
def migrated_postgres_url(_postgres_with_tables: str) -> Iterator[str]:
    """The URL of a PostgreSQL database that has all tables, and no rows."""
    yield _postgres_with_tables
    others = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
    with psycopg.connect(_postgres_with_tables, autocommit=True) as connection:
        connection.execute(f"{others} WHERE datname = current_database() AND pid <> pg_backend_pid()")
        connection.execute(f"TRUNCATE {', '.join(metadata.tables)} RESTART IDENTITY")


@pytest.fixture(scope="session")
def _sqlite_with_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated file to copy."""
    path = tmp_path_factory.mktemp("sqlite") / "jobs.db"
    connect_database(f"sqlite:///{path}").dispose()
    return path


# What these test is above the database; the statements run on both kinds in the tests of the store.
SQLITE_ONLY = (
    "finalize",
    "planner",
    "planner_outputs",
    "publishing",
    "regroup",
    "store_commits",
    "store_pieces",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "store_url" in metafunc.fixturenames:
        module = metafunc.module.__name__.rpartition(".test_")[2]
        kinds = ["sqlite"] if module in SQLITE_ONLY else ["sqlite", "postgresql"]
        metafunc.parametrize("store_url", kinds, indirect=True)


@pytest.fixture
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without jobs: of each kind once, or of SQLite where SQLITE_ONLY says so."""
    if request.param == "postgresql":
        url: str = request.getfixturevalue("migrated_postgres_url")
        return url
    shutil.copy(request.getfixturevalue("_sqlite_with_tables"), tmp_path / "jobs.db")
    return f"sqlite:///{tmp_path}/jobs.db"


@pytest.fixture(scope="session")
def _postgres_engine(_postgres_with_tables: str) -> Engine:
    """For all tests: an engine remembers the statements that it compiled, which are a quarter of a test's time."""
    return connect_database(_postgres_with_tables)


@pytest.fixture(scope="session")
def _sqlite_engine(_sqlite_with_tables: Path) -> Engine:
    """For all tests, at a link that each of them sets to its own file; no test here cuts the power."""
    link = _sqlite_with_tables.with_name("link.db")
    link.symlink_to(_sqlite_with_tables)
    engine = connect_database(f"sqlite:///{link}")
    engine.dispose()
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
    return engine


@pytest.fixture
def store(request: pytest.FixtureRequest, store_url: str, clock: Clock) -> Iterator[Store]:
    if store_url.startswith("sqlite:///"):
        engine: Engine = request.getfixturevalue("_sqlite_engine")
        link = Path(engine.url.database or "")
        link.unlink()
        link.symlink_to(store_url.removeprefix("sqlite:///"))
    else:
        engine = request.getfixturevalue("_postgres_engine")
    with Store(Database(engine, clock)) as opened:
        yield opened


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, out: Path) -> str:
    """An output in each storage."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3_root')}/out"
    return str(out)


@pytest.fixture
def storage(out: Path) -> Storage:
    return open_storage(str(out))


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of every GET of an input in S3."""
    sizes: list[int] = []
    get = S3File._get

    def count(self: S3File, start: int, size: int) -> bytes:
        sizes.append(size)
        return get(self, start, size)

    monkeypatch.setattr(S3File, "_get", count)
    return sizes
