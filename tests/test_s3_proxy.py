"""The proxy before S3 lets honest requests through, and each fault is what its name says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import boto3
import botocore.config
import botocore.exceptions
import pytest

from examples.cluster.servers import S3Server
from tests.s3_proxy import Fault, S3Proxy, random_faults, s3_proxy_before

LARGE = os.urandom(3_000_000)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with s3_proxy_before(s3_server.port) as opened:
        yield opened


@pytest.fixture
def client(proxy: S3Proxy, s3_endpoint: str) -> Iterator[Any]:
    """A client that goes through the proxy and tries once."""
    config = botocore.config.Config(
        retries={"total_max_attempts": 1}, read_timeout=1, response_checksum_validation="when_required"
    )
    opened = boto3.client("s3", endpoint_url=proxy.endpoint, config=config)
    yield opened
    opened.close()


def keys(client: Any, bucket: str) -> list[str]:
    return [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket).get("Contents", [])]


def test_without_faults_it_is_not_there(proxy: S3Proxy, client: Any, s3_bucket: str) -> None:
    client.put_object(Bucket=s3_bucket, Key="a b/key", Body=LARGE, Metadata={"kind": "test"})
    assert client.get_object(Bucket=s3_bucket, Key="a b/key")["Body"].read() == LARGE
    assert client.get_object(Bucket=s3_bucket, Key="a b/key", Range="bytes=5-9")["Body"].read() == LARGE[5:10]
    head = client.head_object(Bucket=s3_bucket, Key="a b/key")
    assert (head["ContentLength"], head["Metadata"]) == (len(LARGE), {"kind": "test"})
    client.delete_object(Bucket=s3_bucket, Key="a b/key")
    assert keys(client, s3_bucket) == []
    assert set(proxy.counts) == {""}


@pytest.mark.parametrize(
    ("fault", "is_stored"),
    [
        (Fault.INTERNAL_ERROR, False),
        (Fault.SLOW_DOWN, False),
        (Fault.RESET, False),
        (Fault.SILENCE, False),
        (Fault.LOST_REPLY, True),
        (Fault.FLIP, False),  # the signature covers the body
    ],
)
def test_a_faulty_put_fails(
    proxy: S3Proxy, client: Any, s3_bucket: str, fault: Fault, is_stored: bool
) -> None:
    proxy.choose = lambda method, path: fault if method == "PUT" else None
    with pytest.raises((botocore.exceptions.ClientError, botocore.exceptions.HTTPClientError)):
        client.put_object(Bucket=s3_bucket, Key="key", Body=b"value")
    assert keys(client, s3_bucket) == (["key"] if is_stored else [])
    assert proxy.counts[fault] == 1


def test_a_flipped_or_truncated_get_is_not_what_was_put(proxy: S3Proxy, client: Any, s3_bucket: str) -> None:
    client.put_object(Bucket=s3_bucket, Key="key", Body=LARGE)
    proxy.choose = lambda method, path: Fault.FLIP
    flipped = client.get_object(Bucket=s3_bucket, Key="key")["Body"].read()
    assert len(flipped) == len(LARGE) and flipped != LARGE
    proxy.choose = lambda method, path: Fault.TRUNCATE
    with pytest.raises(botocore.exceptions.ResponseStreamingError):
        client.get_object(Bucket=s3_bucket, Key="key")["Body"].read()


def test_a_share_of_requests_is_the_same_for_the_same_seed() -> None:
    first, second = random_faults(0.2, seed=7), random_faults(0.2, seed=7)
    chosen = [first("GET", "/") for _ in range(1000)]
    assert chosen == [second("GET", "/") for _ in range(1000)]
    assert 150 < sum(fault is not None for fault in chosen) < 250
