"""The proxy before the servers does to a connection what its methods say, and nothing else."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import boto3
import botocore.config
import botocore.exceptions
import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from examples.cluster.servers import PostgresServer, RedisServer, S3Server
from tests.tcp_proxy import TcpProxy, proxy_before


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[TcpProxy]:
    with proxy_before(redis_server.port) as opened:
        yield opened


@pytest.fixture
def client(proxy: TcpProxy) -> Iterator[redis.Redis]:
    """A client that never tries again by itself."""
    opened = redis.Redis("127.0.0.1", proxy.port, socket_timeout=0.3, retry=Retry(NoBackoff(), 0))
    with opened:
        yield opened


def test_it_forwards_both_ways(client: redis.Redis) -> None:
    value = os.urandom(1_000_000)
    client.set("large", value)
    assert client.get("large") == value


def test_a_cut_connection_fails_and_the_next_one_works(proxy: TcpProxy, client: redis.Redis) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as connection:
        connection.sendall(b"PING\r\n")
        assert connection.recv(100) == b"+PONG\r\n"
        assert proxy.cut() == 1
        with pytest.raises(ConnectionResetError):
            connection.recv(100)
    client.ping()
    assert proxy.num_accepted == 2


def test_a_stalled_connection_times_out_until_it_is_resumed(proxy: TcpProxy, client: redis.Redis) -> None:
    client.ping()
    proxy.stall()
    with pytest.raises(redis.TimeoutError):
        client.ping()
    with pytest.raises(redis.TimeoutError):  # a new connection stalls too
        client.ping()
    proxy.resume()
    client.ping()


def test_a_refusing_proxy_is_a_server_that_is_down(proxy: TcpProxy, client: redis.Redis) -> None:
    client.ping()
    proxy.refuse()
    proxy.refuse()
    for _ in range(2):
        with pytest.raises(redis.ConnectionError):
            client.ping()
    proxy.resume()
    client.ping()


def test_a_lost_reply_is_a_commit_that_happened(postgres_server: PostgresServer, postgres_url: str) -> None:
    name = postgres_url.rsplit("/", 1)[1]
    with proxy_before(postgres_server.port) as proxy, psycopg.connect(postgres_url) as reader:
        url = postgres_server.url(name, port=proxy.port)
        connection = psycopg.connect(url)
        connection.execute("CREATE TABLE kept (x int)")
        proxy.loses_reply_to = lambda chunk: b"COMMIT" in chunk
        with pytest.raises(psycopg.OperationalError):
            connection.commit()
        connection.close()
        assert proxy.num_lost_replies == 1
        assert reader.execute("SELECT count(*) FROM kept").fetchone() == (0,)


def test_s3_works_through_it(s3_server: S3Server, s3_bucket: str) -> None:
    with proxy_before(s3_server.port) as proxy:
        retries = {"total_max_attempts": 1}
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{proxy.port}",
            config=botocore.config.Config(retries=retries),
        )
        client.put_object(Bucket=s3_bucket, Key="key", Body=b"value")
        proxy.loses_reply_to = lambda chunk: chunk.endswith(b"value")
        with pytest.raises(botocore.exceptions.HTTPClientError):
            client.put_object(Bucket=s3_bucket, Key="other", Body=b"value")
        proxy.loses_reply_to = lambda chunk: False
        assert client.get_object(Bucket=s3_bucket, Key="other")["Body"].read() == b"value"
        client.close()
