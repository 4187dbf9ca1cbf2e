"""The cluster of the integration tests, on each database and each kind of storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from examples.cluster.servers import S3Server
from tests.integration.cluster import Cluster
from tests.s3_proxy import S3Proxy, s3_proxy_before

PLACES = [(database, files) for database in ("sqlite", "postgres") for files in ("local", "s3")]


@pytest.fixture(params=PLACES, ids="-".join)
def cluster(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Cluster]:
    """A cluster without workers, its servers empty; the test runs once for each database and kind of storage.

    `@pytest.mark.parametrize("cluster", [("postgres", "s3")], indirect=True)` chooses.
    """
    database, files = request.param
    url = database_url(request, database)
    with closing(build_cluster(request, files, database_url=url, broker_url=redis_url)) as opened:
        yield opened


def build_cluster(request: pytest.FixtureRequest, files: str, **urls: Any) -> Cluster:
    """A cluster in the test's folder whose jobs read and write local files, or objects in S3."""
    folder: Path = request.getfixturevalue("tmp_path")
    if files == "s3":
        root, server = (request.getfixturevalue(f"s3_{name}") for name in ("root", "server"))
        return Cluster(folder, root=root, s3=server, **urls)
    (folder / "data").mkdir()
    return Cluster(folder, root=str(folder / "data"), **urls)


def database_url(request: pytest.FixtureRequest, database: str) -> str:
    if database == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite:///{request.getfixturevalue('tmp_path') / 'jobs.db'}"


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    """A way to S3 that breaks what a test tells it to."""
    with s3_proxy_before(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def faulty_s3(request: pytest.FixtureRequest, redis_url: str, s3_proxy: S3Proxy) -> Iterator[Cluster]:
    """A cluster whose workers reach S3 by s3_proxy; on SQLite, in the long tests on PostgreSQL."""
    is_long = request.node.get_closest_marker("long") is not None
    urls = {
        "database_url": database_url(request, "postgres" if is_long else "sqlite"),
        "broker_url": redis_url,
    }
    with closing(build_cluster(request, "s3", s3_endpoint=s3_proxy.endpoint, **urls)) as opened:
        yield opened
