"""Holds the tests' own servers to what the other tests rely on: fresh, real, and able to crash and come back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import boto3
import psutil
import psycopg
import pytest
import redis

from examples.cluster.server_process import wheel_file
from examples.cluster.servers import PostgresServer, RedisServer, S3Server, running
from tests.conftest import start_or_skip


@pytest.mark.parametrize("turn", [1, 2])
def test_each_test_has_an_empty_redis_database_of_its_own(redis_url: str, turn: int) -> None:
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
        client.set("key", "value")


def test_postgres_answers_over_tcp_on_an_empty_database(postgres_url: str) -> None:
    assert "@127.0.0.1:" in postgres_url
    with psycopg.connect(postgres_url) as connection:
        count = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone()
    assert count == (0,)


def test_s3_is_found_through_the_environment(s3_endpoint: str, s3_bucket: str) -> None:
    assert os.environ["AWS_ENDPOINT_URL"] == s3_endpoint
    client = boto3.client("s3")
    client.put_object(Bucket=s3_bucket, Key="a/b", Body=b"x" * 100)
    assert client.head_object(Bucket=s3_bucket, Key="a/b")["ContentLength"] == 100
    client.close()


def test_s3_comes_back_with_its_data_after_a_crash() -> None:
    with running(S3Server) as server:
        bucket = server.create_bucket()
        with server.client() as client:
            client.put_object(Bucket=bucket, Key="key", Body=b"value")
        server.stop()
        server.start()
        with server.client() as client:
            assert client.get_object(Bucket=bucket, Key="key")["Body"].read() == b"value"


def test_postgres_comes_back_with_its_data_and_answers_nobody_while_it_is_paused() -> None:
    with running(PostgresServer) as server:
        server.execute("CREATE TABLE kept (x int)")
        server.execute("INSERT INTO kept VALUES (7)")
        server.stop()
        server.start()
        assert server.execute("SELECT x FROM kept") == [(7,)]
        with psycopg.connect(server.url()) as connection:
            server.pause()
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(server.url(), connect_timeout=2)
            server.unpause()
            assert connection.execute("SELECT 1").fetchone() == (1,)
        server.pause()  # the stop at the end must not wait for it


def test_a_server_dies_with_the_process_that_started_it(repo_root: Path) -> None:
    code = (
        "import os, time\n"
        "from examples.cluster.servers import RedisServer, running\n"
        "with running(RedisServer) as server:\n"
        "    print(server.process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=repo_root, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        assert "redis-server" in server.name()
        parent.kill()
    server.wait(timeout=10)


def test_redis_comes_back_with_its_data_and_outlives_the_thread_that_started_it() -> None:
    with running(RedisServer) as server:
        with server.client() as client:
            client.set("key", "value")
        server.stop()
        thread = threading.Thread(target=server.start)
        thread.start()
        thread.join()
        time.sleep(0.1)
        with server.client() as client:
            assert client.get("key") == b"value"


class MissingServer(RedisServer):
    """A server whose wheel is not installed."""

    def command(self) -> list[str]:
        return [str(wheel_file("no_such_wheel", "bin"))]


def test_a_missing_server_skips_the_test_here_and_fails_it_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with ExitStack() as stack, pytest.raises(pytest.skip.Exception, match="no_such_wheel"):
        start_or_skip(stack, MissingServer)
    monkeypatch.setenv("CI", "1")
    with ExitStack() as stack, pytest.raises(pytest.fail.Exception, match="no_such_wheel"):
        start_or_skip(stack, MissingServer)


def test_a_server_that_cannot_start_says_why() -> None:
    with running(RedisServer) as first, running(RedisServer) as second:
        second.stop()
        second.ports = first.ports
        first.pause()  # else it would answer in the place of the second
        with pytest.raises(RuntimeError, match="in use"):
            second.start()
