"""An S3 object as a file: what is fetched when it is read in one place, in several, or from a store that fails."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

import pytest

from examples.cluster.servers import S3Server
from gristmill.jobs.errors import OutputError, SourceError, SourceUnavailable
from gristmill.jobs.input.files import open_input, stat_input
from gristmill.jobs.storage.s3 import reader
from gristmill.jobs.storage.s3.client import s3_client, split_s3_uri
from gristmill.jobs.storage.s3.reader import S3File
from tests.s3_proxy import Fault, S3Proxy, s3_proxy_before


def put(root: str, data: bytes) -> str:
    bucket, _ = split_s3_uri(root)
    s3_client().put_object(Bucket=bucket, Key="a.bin", Body=data)
    return f"{root}/a.bin"


@pytest.fixture
def proxy(s3_server: S3Server, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between tries
    with s3_proxy_before(s3_server.port) as running:
        yield running


def open_by(proxy: S3Proxy, uri: str, monkeypatch: pytest.MonkeyPatch) -> S3File:
    """A reader of `uri` whose requests go through the proxy."""
    found = stat_input(uri)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    return S3File(uri, found.version, found.size_bytes)


DATA = bytes(range(256)) * 2000


@pytest.mark.parametrize(
    "fault", [Fault.TRUNCATE, Fault.RESET, Fault.LOST_REPLY, Fault.SLOW_DOWN, Fault.INTERNAL_ERROR]
)
def test_a_request_that_fails_is_sent_again(
    proxy: S3Proxy, s3_root: str, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    file = open_by(proxy, put(s3_root, DATA), monkeypatch)
    proxy.first(4, fault, "GET")
    assert file.read() == DATA
    assert len(proxy.requests) > 4


@pytest.mark.parametrize("fault", [Fault.TRUNCATE, Fault.RESET, Fault.SLOW_DOWN])
def test_a_store_that_goes_on_failing_is_unavailable(
    proxy: S3Proxy, s3_root: str, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    file = open_by(proxy, put(s3_root, DATA), monkeypatch)
    proxy.always(fault)
    with pytest.raises(SourceUnavailable, match=r"a\.bin"):
        file.read()
    proxy.always(None)
    assert file.read() == DATA


def test_a_changed_object_is_an_error_of_its_kind(s3_root: str) -> None:
    uri = put(s3_root, DATA)
    found = stat_input(uri)
    put(s3_root, b"shorter")
    for kind, error in (("source", SourceError), ("output", OutputError)):
        with pytest.raises(error, match="changed"):
            S3File(uri, found.version, found.size_bytes, kind=kind).read()  # type: ignore[arg-type]
    bucket, key = split_s3_uri(uri)
    s3_client().delete_object(Bucket=bucket, Key=key)
    with pytest.raises(SourceError, match="is gone"):
        S3File(uri, found.version, found.size_bytes).read()
    with pytest.raises(FileNotFoundError):
        S3File(uri, found.version, found.size_bytes, kind="output").read()


def test_a_store_that_ignores_the_asked_version_is_seen_through(s3_root: str) -> None:
    uri = put(s3_root, DATA)
    file = S3File(uri, "other", len(DATA))
    get_object = s3_client().get_object
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3_client(), "get_object", lambda IfMatch, **place: get_object(**place))
        with pytest.raises(SourceError, match="changed"):
            file.read(10)


def test_an_s3_file_is_a_file(s3_root: str) -> None:
    data = DATA
    with open_input(put(s3_root, data)) as file:
        assert file.readable() and file.seekable() and not file.writable()
        assert (file.read(10), file.tell()) == (data[:10], 10)
        assert file.seek(-20, io.SEEK_END) == len(data) - 20
        assert file.read() == data[-20:] and file.read() == file.read(5) == b""
        assert file.seek(100) == 100 and file.seek(5, io.SEEK_CUR) == 105
        assert io.BufferedReader(file, 1000).read(5000) == data[105:5105]
        with pytest.raises(ValueError, match="before the start"):
            file.seek(-1)
    assert file.closed


def test_places_read_in_turn_are_fetched_once(s3_root: str, fetched: list[int]) -> None:
    data = bytes(range(256)) * (40 << 10)  # 10 MiB
    uri = put(s3_root, data)
    with open_input(uri) as file:
        starts = [index * (1 << 20) for index in range(8)]
        for step in range(0, 1 << 20, 100_000):
            for start in starts:
                file.seek(start + step)
                assert file.read(100_000) == data[start + step : start + step + 100_000]
    assert sum(fetched) < 1.4 * len(data)
    assert len(fetched) < 40


def test_reading_on_ends_with_the_expected_range(s3_root: str, fetched: list[int]) -> None:
    uri = put(s3_root, bytes(4 << 20))
    with open_input(uri) as file:
        file.expect([(1 << 20, 2 << 20)])
        file.seek(1 << 20)
        while file.tell() < (2 << 20) + 20_000:
            file.read(10_000)
    assert sum(fetched) < (1 << 20) + 30_000


def test_what_is_held_is_bounded_however_many_places_are_read(
    s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_HELD_BYTES", 1 << 20)
    monkeypatch.setattr(reader, "_MAX_WINDOWS", 10)
    data = bytes(range(256)) * (32 << 10)
    with open_input(put(s3_root, data)) as file:
        for step in range(0, 400_000, 50_000):
            for start in range(0, len(data), 512 << 10):
                file.seek(start + step)
                assert file.read(50_000) == data[start + step : start + step + 50_000]
                assert len(file._windows) <= 10
                assert sum(len(window.data) for window in file._windows) <= 1 << 20
