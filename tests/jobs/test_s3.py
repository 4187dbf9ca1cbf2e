"""The S3 client, its errors in our words, and the self-test of an endpoint."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import boto3
import pytest
from botocore.exceptions import ClientError

from examples.cluster.servers import S3Server
from gristmill.jobs.errors import (
    OutputError,
    OutputUnavailable,
    RefusedError,
    SourceError,
    SourceUnavailable,
    Unavailable,
)
from gristmill.jobs.storage.s3.check import check_s3
from gristmill.jobs.storage.s3.client import s3_client, s3_errors, split_s3_uri
from tests.s3_proxy import Fault, S3Proxy, s3_proxy_before


@pytest.fixture
def proxy(s3_server: S3Server, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    monkeypatch.setattr("gristmill.jobs.storage.s3.client.MAX_TRIES", 2)
    with s3_proxy_before(s3_server.port) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


def answer(status: int, code: str, message: str = "no") -> ClientError:
    response = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "PutObject")


def test_a_uri_is_a_bucket_and_a_key() -> None:
    assert split_s3_uri("s3://bucket/a/b.jsonl") == ("bucket", "a/b.jsonl")
    assert split_s3_uri("s3://bucket") == ("bucket", "")
    for uri in ("s3://", "s3:///key", "/local/path", "gs://bucket/key"):
        with pytest.raises(RefusedError, match="write s3://BUCKET/KEY"):
            split_s3_uri(uri)


@pytest.mark.parametrize(
    "uri", ["s3://bucket/allowed/../secret", "s3://../x", "s3://bucket/./x", "s3://b/.."]
)
def test_a_uri_cannot_climb(uri: str) -> None:
    with pytest.raises(RefusedError, match="write the key in full"):
        split_s3_uri(uri)


def test_a_process_has_one_client_an_endpoint(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[object] = []
    threads = [threading.Thread(target=lambda: clients.append(s3_client())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(clients) == 4 and len(set(map(id, clients))) == 1
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert s3_client() is not clients[0]


def test_a_server_of_ones_own_gets_no_checksum_trailers_and_its_buckets_in_the_path(s3_endpoint: str) -> None:
    config = s3_client().meta.config
    assert config.request_checksum_calculation == config.response_checksum_validation == "when_required"
    assert config.s3["addressing_style"] == "path"
    assert config.retries == {"mode": "standard", "total_max_attempts": 10}
    assert (config.connect_timeout, config.read_timeout) == (5, 60)


def test_amazon_keeps_its_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    client = s3_client()
    assert client.meta.endpoint_url == "https://s3.eu-central-1.amazonaws.com"
    assert client.meta.config.request_checksum_calculation == "when_supported"


@pytest.mark.parametrize(("name", "value"), [("AWS_ENDPOINT_URL", "not a url"), ("AWS_PROFILE", "nobody")])
def test_settings_that_make_no_client_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(RefusedError, match=r"S3 can't be set up.*check the AWS_\* variables"):
        s3_client()


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (500, "InternalError"),
        (502, "502"),
        (503, "SlowDown"),
        (503, "ServiceUnavailable"),
        (504, "504"),
        (429, "TooManyRequests"),
        (400, "BadDigest"),
        (400, "RequestTimeout"),
        (400, "ExpiredToken"),
        (404, "NoSuchUpload"),
        (409, "OperationAborted"),
    ],
)
def test_answers_that_may_pass_are_waited_for(status: int, code: str) -> None:
    for kind, expected in (("source", SourceUnavailable), ("output", OutputUnavailable)):
        with pytest.raises(expected, match=rf"can't reach s3://b/k now \({status} {code}"):
            with s3_errors("s3://b/k", kind):
                raise answer(status, code)


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "AccessDenied"), (404, "NoSuchBucket"), (400, "InvalidArgument"), (501, "NotImplemented")],
)
def test_answers_that_stay_are_errors_with_a_remedy(status: int, code: str) -> None:
    for kind, expected in (("source", SourceError), ("output", OutputError)):
        with pytest.raises(expected, match=rf"s3://b/k \({status} {code}: no\): check the bucket") as caught:
            with s3_errors("s3://b/k", kind):
                raise answer(status, code)
        assert not isinstance(caught.value, Unavailable)


def test_a_missing_key_is_a_missing_file() -> None:
    with pytest.raises(FileNotFoundError, match="s3://b/k is missing"), s3_errors("s3://b/k", "output"):
        raise answer(404, "NoSuchKey")


def test_a_message_is_one_short_line() -> None:
    with pytest.raises(OutputError) as caught, s3_errors("s3://b/k", "output"):
        raise answer(403, "AccessDenied", "a" * 1000 + "\nsecond line")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_nobody_there_is_waited_for(monkeypatch: pytest.MonkeyPatch, s3_endpoint: str) -> None:
    monkeypatch.setattr("gristmill.jobs.storage.s3.client.MAX_TRIES", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:secret@127.0.0.1:9")
    with pytest.raises(SourceUnavailable, match="can't reach") as caught, s3_errors("s3://b/k", "source"):
        s3_client().head_object(Bucket="bucket", Key="k")
    assert "secret" not in str(caught.value)


def test_without_credentials_there_is_no_way_in(monkeypatch: pytest.MonkeyPatch, s3_endpoint: str) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(OutputError, match="NoCredentialsError.*credentials"), s3_errors("s3://b/k", "output"):
        s3_client().put_object(Bucket="bucket", Key="k", Body=b"")


def test_a_good_endpoint_passes_its_check_and_nothing_is_left(s3_root: str, s3_server: S3Server) -> None:
    for root in (s3_root, f"{s3_root}/jobs/out/"):
        check_s3(root)
    with s3_server.client() as client:
        assert not client.list_objects_v2(Bucket=split_s3_uri(s3_root).bucket).get("Contents")


def test_the_check_says_which_bucket_is_missing(s3_endpoint: str) -> None:
    with pytest.raises(RefusedError, match="a put that is read back.*404 NoSuchBucket"):
        check_s3("s3://no-such-bucket/x")


@pytest.mark.parametrize("fault", [ValueError("Invalid timestamp"), KeyError("UploadId")])
def test_an_answer_that_makes_no_sense_is_asked_for_again(fault: Exception) -> None:
    """A flipped bit in a date or a tag: no request failed, and botocore or our own look at it did."""
    with (
        pytest.raises(OutputUnavailable, match="s3://b/k now.*makes no sense"),
        s3_errors("s3://b/k", "output"),
    ):
        raise fault


def test_the_check_waits_for_a_server_that_is_away(proxy: S3Proxy, s3_root: str) -> None:
    proxy.always(Fault.RESET)
    with pytest.raises(OutputUnavailable):
        check_s3(s3_root)


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ("If-None-Match", r"a conditional put \(If-None-Match\)"),
        ("Content-MD5", "a put with a wrong MD5"),
        ("Range", "a read of a range"),
        ("x-amz-metadata-directive", "a copy with new metadata"),
        ("x-amz-meta-gristmill-attempt", "a put that is read back"),
    ],
)
def test_a_server_that_ignores_a_header_is_found_out(
    s3_root: str, monkeypatch: pytest.MonkeyPatch, header: str, what: str
) -> None:
    """As if the server did not know the header: it is taken out before the request is signed."""
    client = boto3.session.Session().client("s3", config=s3_client().meta.config)

    def forget(request: object, **_: object) -> None:
        del request.headers[header]  # type: ignore[attr-defined]

    client.meta.events.register("before-sign.s3", forget)
    monkeypatch.setattr("gristmill.jobs.storage.s3.check.s3_client", lambda: client)
    with closing(client), pytest.raises(RefusedError, match=f"can't be used: {what}"):
        check_s3(s3_root)
