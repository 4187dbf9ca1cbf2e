"""The cluster of the integration tests, on each database and each kind of storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.cluster.servers import S3Server
from tests.integration.cluster import Cluster
from tests.s3_proxy import S3Proxy, s3_proxy_before

PLACES = [(database, files) for database in ("sqlite", "postgres") for files in ("local", "s3")]


@pytest.fixture(params=PLACES, ids="-".join)
def cluster(request: pytest.FixtureRequest, tmp_path: Path, redis_url: str) -> Iterator[Cluster]:
    """A cluster without workers, its servers empty; the test runs once for each database and kind of storage.

    `@pytest.mark.parametrize("cluster", [("postgres", "s3")], indirect=True)` chooses.
    """
    database, files = request.param
    is_s3 = files == "s3"
    (tmp_path / "data").mkdir()
    opened = Cluster(
        tmp_path,
        database_url=_database_url(request, database, tmp_path),
        broker_url=redis_url,
        root=request.getfixturevalue("s3_root") if is_s3 else str(tmp_path / "data"),
        s3=request.getfixturevalue("s3_server") if is_s3 else None,
    )
    yield opened
    opened.close()


def _database_url(request: pytest.FixtureRequest, database: str, folder: Path) -> str:
    if database == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite:///{folder / 'jobs.db'}"


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    """A way to S3 that breaks what a test tells it to."""
    with s3_proxy_before(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def faulty_s3(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    redis_url: str,
    s3_root: str,
    s3_server: S3Server,
    s3_proxy: S3Proxy,
) -> Iterator[Cluster]:
    """A cluster whose workers reach S3 by s3_proxy; on SQLite, in the long tests on PostgreSQL."""
    database = "sqlite" if request.node.get_closest_marker("long") is None else "postgres"
    opened = Cluster(
        tmp_path,
        database_url=_database_url(request, database, tmp_path),
        broker_url=redis_url,
        root=s3_root,
        s3=s3_server,
        s3_endpoint=s3_proxy.endpoint,
    )
    yield opened
    opened.close()
