"""What every test shares: a job database of its own, so that no test meets the user's jobs, and real servers."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest

from examples.cluster.server_process import MissingServerError, Server
from examples.cluster.servers import PostgresServer, RedisServer, S3Server, running

S = TypeVar("S", bound=Server)


def pytest_configure(config: pytest.Config) -> None:
    """The processes of pytest-xdist ignore Ctrl-C, and so would every program that a test starts."""
    if hasattr(config, "workerinput"):
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_state_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point the default job database into a temporary folder, also for child processes."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    for name in list(os.environ):
        if name.startswith(("GRISTMILL_", "AWS_")):
            monkeypatch.delenv(name)
    return folder


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2_path(repo_root: Path) -> str:
    """The SmolLM2-135M-Instruct GGUF file that `make setup` links; its absence is an error, never a skip."""
    path = repo_root / "models" / "smollm2-135m-instruct.gguf"
    assert path.exists(), f"{path} is missing: run `make setup`"
    return str(path)


def start_or_skip(stack: ExitStack, kind: type[S]) -> S:
    """Starts a server that ends with the stack; a missing wheel skips the test here and fails it in CI."""
    try:
        return stack.enter_context(running(kind))
    except MissingServerError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """The session's Redis. A test that stops or empties it starts one of its own with `running`."""
    with ExitStack() as stack:
        yield start_or_skip(stack, RedisServer)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The session's PostgreSQL."""
    with ExitStack() as stack:
        yield start_or_skip(stack, PostgresServer)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """The session's S3."""
    with ExitStack() as stack:
        yield start_or_skip(stack, S3Server)


@pytest.fixture(scope="session")
def _redis_databases() -> Iterator[int]:
    return itertools.cycle(range(RedisServer.num_databases))


@pytest.fixture
def redis_url(redis_server: RedisServer, _redis_databases: Iterator[int]) -> str:
    """The URL of an empty Redis database."""
    database = next(_redis_databases)
    with redis_server.client(database) as client:
        client.flushdb()
    return redis_server.url(database)


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of an empty PostgreSQL database, dropped after the test whoever is still connected."""
    name = postgres_server.create_database()
    yield postgres_server.url(name)
    postgres_server.drop_database(name)


@pytest.fixture
def s3_endpoint(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The endpoint's URL; boto3's variables point there, also for child processes."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server.endpoint


@pytest.fixture
def s3_bucket(s3_server: S3Server, s3_endpoint: str) -> Iterator[str]:
    """The name of an empty bucket."""
    name = s3_server.create_bucket()
    yield name
    s3_server.delete_bucket(name)


@pytest.fixture
def s3_root(s3_bucket: str) -> str:
    """`s3://BUCKET` of an empty bucket."""
    return f"s3://{s3_bucket}"
