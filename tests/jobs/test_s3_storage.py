"""The S3 storage against a real server, and through a proxy that breaks things."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.cluster.servers import S3Server
from gristmill.jobs.errors import OutputError, OutputUnavailable, RefusedError
from gristmill.jobs.storage.hashing_file import HashingFile
from gristmill.jobs.storage.remote import S3Storage
from gristmill.jobs.storage.s3.reader import S3File
from tests.s3_proxy import Fault, S3Proxy, s3_proxy_before

Uploads = Callable[[], list[str]]
DATA = bytes(range(256)) * 40
LARGE = os.urandom(100_000) * 53  # two parts of an upload


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.jobs.storage.s3.writer.PART_BYTES", 5 << 20)


@pytest.fixture
def storage(s3_root: str) -> S3Storage:
    """The storage that tests look with: nothing breaks on its way."""
    return S3Storage(f"{s3_root}/out")


@pytest.fixture(scope="module")
def _module_proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with s3_proxy_before(s3_server.port) as running:
        yield running


@pytest.fixture
def proxy(storage: S3Storage, _module_proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """Breaks nothing until it is told to."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", _module_proxy.endpoint)
    yield _module_proxy
    _module_proxy.always(None)
    _module_proxy.requests.clear()


@pytest.fixture
def shaky(proxy: S3Proxy, s3_root: str) -> S3Storage:
    """The same place through the proxy."""
    return S3Storage(f"{s3_root}/out")


@pytest.fixture
def uploads(s3_server: S3Server, s3_bucket: str) -> Uploads:
    """The keys of the bucket's unfinished uploads."""

    def look() -> list[str]:
        with s3_server.client() as client:
            answer = client.list_multipart_uploads(Bucket=s3_bucket)
            return sorted(upload["Key"] for upload in answer.get("Uploads", ()))

    return look


def write(storage: S3Storage, name: str, data: bytes) -> HashingFile:
    with storage.create(name) as file:
        file.write(data)
    return file


def test_a_large_file_is_put_by_parts_and_leaves_no_upload(storage: S3Storage, uploads: Uploads) -> None:
    file = write(storage, "_attempts/large", LARGE)
    assert (storage.size("_attempts/large"), file.size) == (len(LARGE), len(LARGE))
    with storage.open_checked("_attempts/large", file.sha256) as reader:
        assert reader.read() == LARGE
    assert storage.publish("_attempts/large", "part-00000.jsonl")
    assert storage.holds("part-00000.jsonl", "_attempts/large", len(LARGE))
    assert uploads() == []


def test_a_large_file_that_is_interrupted_leaves_no_upload(
    storage: S3Storage, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("gristmill.jobs.storage.s3.writer._put_part", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(storage, "_attempts/large", LARGE)
    assert (storage.names(), uploads()) == ([], [])


def test_a_sweep_aborts_the_uploads_of_this_folder_only(
    storage: S3Storage, uploads: Uploads, s3_server: S3Server, s3_bucket: str
) -> None:
    keys = ["out/part-0", "out/_attempts/x", "out/another-job/part-0", "out2/part-0", "part-0"]
    with s3_server.client() as client:
        for key in keys:
            client.create_multipart_upload(Bucket=s3_bucket, Key=key)
    storage.sweep()
    assert uploads() == sorted(keys[2:])


def test_an_upload_that_was_swept_under_its_writer_is_tried_again(
    storage: S3Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = hashlib.md5

    def sweep_first(data: bytes, **how: bool) -> object:
        if len(data) < 5 << 20:
            storage.sweep()
        return plain(data, **how)

    monkeypatch.setattr("gristmill.jobs.storage.s3.client.hashlib.md5", sweep_first)
    with pytest.raises(OutputUnavailable, match="NoSuchUpload"):
        write(storage, "_attempts/large", LARGE)
    assert storage.names() == []


def test_a_listing_goes_on_over_pages(storage: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = storage._client.get_paginator

    class Pages:
        def paginate(self, **how: object) -> object:
            return plain("list_objects_v2").paginate(**how, PaginationConfig={"PageSize": 3})

    names = sorted(f"part-{index:05d}.jsonl" for index in range(10))
    for name in names:
        storage.put(name, b"")
    monkeypatch.setattr(storage._client, "get_paginator", lambda name: Pages())
    assert storage.names() == names


def test_many_objects_are_deleted_in_batches(storage: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.jobs.storage.remote._DELETE_BATCH", 3)
    names = [f"_attempts/{index}" for index in range(7)]
    for name in names:
        storage.put(name, b"")
    storage.delete_all(iter([*names, "_attempts/none"]))
    assert storage.names() == []


def test_a_batch_of_deletions_carries_its_md5(storage: S3Storage) -> None:
    sent: list[str] = []

    def note(request: Any, **_: Any) -> None:
        sent.append(request.headers["Content-MD5"])

    events = storage._client.meta.events
    events.register("before-send.s3.DeleteObjects", note)
    try:
        storage.delete_all(["a"])
    finally:
        events.unregister("before-send.s3.DeleteObjects", note)
    assert len(sent) == 1 and len(base64.b64decode(sent[0])) == 16


def test_an_object_in_place_is_not_copied_again(shaky: S3Storage, proxy: S3Proxy) -> None:
    shaky.put("_attempts/a", DATA)
    assert shaky.publish("_attempts/a", "part-0")
    num_puts = sum(method == "PUT" for method, _ in proxy.requests)
    assert shaky.publish("_attempts/a", "part-0")
    assert sum(method == "PUT" for method, _ in proxy.requests) == num_puts
    shaky.delete("_attempts/a")
    assert shaky.publish("_attempts/a", "part-0")


def test_a_late_copy_of_an_older_attempt_is_told_from_the_newer(storage: S3Storage) -> None:
    storage.put("_attempts/old", b"1234")
    storage.put("_attempts/new", b"5678")
    storage.publish("_attempts/new", "part-0")
    storage.publish("_attempts/old", "part-0")
    assert not storage.holds("part-0", "_attempts/new", 4)
    assert storage.publish("_attempts/new", "part-0")
    assert (storage.read("part-0"), storage.holds("part-0", "_attempts/new", 4)) == (b"5678", True)


def test_a_bucket_that_is_missing_is_refused(s3_endpoint: str) -> None:
    nowhere = S3Storage("s3://no-such-bucket/out")
    with pytest.raises(RefusedError, match="--output s3://no-such-bucket/out can't be written.*NoSuchBucket"):
        nowhere.check_writable()
    with pytest.raises(OutputError, match="NoSuchBucket.*check the bucket"):
        nowhere.put("a", b"")
    with pytest.raises(OutputError, match="NoSuchBucket"):
        nowhere.names()


def test_wrong_credentials_are_refused(s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody-else")
    with pytest.raises(RefusedError, match="can't be written.*403.*credentials"):
        S3Storage(f"{s3_root}/out").check_writable()


def test_a_full_local_disk_says_which_one(storage: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: HashingFile, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(HashingFile, "write", refuse)
    with pytest.raises(OutputError, match="disk full while writing a temporary file in .* for s3://.*/out/a"):
        write(storage, "a", DATA)
    assert storage.names() == []


def test_nothing_is_left_on_local_disk(
    storage: S3Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = write(storage, "large", LARGE)
    storage.open_checked("large", file.sha256).close()
    with pytest.raises(KeyboardInterrupt), storage.create("b") as half:
        half.write(DATA)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "fault", [Fault.SLOW_DOWN, Fault.INTERNAL_ERROR, Fault.RESET, Fault.LOST_REPLY, Fault.FLIP]
)
def test_a_put_that_fails_twice_arrives_whole(
    storage: S3Storage, shaky: S3Storage, proxy: S3Proxy, fault: Fault
) -> None:
    proxy.first(2, fault, "PUT")
    file = write(shaky, "_attempts/a", DATA)
    assert storage.read("_attempts/a") == DATA
    assert file.sha256 == hashlib.sha256(DATA).hexdigest()


@pytest.mark.parametrize(
    ("fault", "method", "part"),
    [
        (Fault.SLOW_DOWN, "PUT", "partNumber=2"),
        (Fault.LOST_REPLY, "PUT", "partNumber=2"),
        (Fault.FLIP, "PUT", "partNumber=2"),
        (Fault.SLOW_DOWN, "POST", "uploadId="),
        (Fault.LOST_REPLY, "POST", "uploadId="),
    ],
)
def test_a_put_by_parts_that_fails_once_in_a_part_or_its_completion_arrives_whole(
    storage: S3Storage,
    shaky: S3Storage,
    proxy: S3Proxy,
    uploads: Uploads,
    fault: Fault,
    method: str,
    part: str,
) -> None:
    proxy.first(1, fault, method, part)
    write(shaky, "_attempts/a", LARGE)
    assert (storage.read("_attempts/a"), uploads()) == (LARGE, [])


@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.RESET, Fault.LOST_REPLY])
def test_a_new_object_whose_reply_is_lost_is_our_own(
    storage: S3Storage, shaky: S3Storage, proxy: S3Proxy, fault: Fault
) -> None:
    proxy.first(1, fault, "PUT")
    assert shaky.put_new("_manifest.json", DATA)
    proxy.first(1, fault, "PUT")
    assert not shaky.put_new("_manifest.json", b"other")
    assert storage.read("_manifest.json") == DATA


@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.LOST_REPLY])
def test_a_copy_whose_reply_is_lost_is_made(
    storage: S3Storage, shaky: S3Storage, proxy: S3Proxy, fault: Fault
) -> None:
    shaky.put("_attempts/a", DATA)
    proxy.first(1, fault, "PUT", "part-0")
    assert shaky.publish("_attempts/a", "part-0")
    assert storage.holds("part-0", "_attempts/a", len(DATA))


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.TRUNCATE, Fault.SLOW_DOWN, Fault.RESET])
def test_a_get_that_is_damaged_once_is_made_again(shaky: S3Storage, proxy: S3Proxy, fault: Fault) -> None:
    file = write(shaky, "a", DATA)
    proxy.first(1, fault, "GET", "/out/a")
    with shaky.open_checked("a", file.sha256) as reader:
        assert reader.read() == DATA
    proxy.first(1, fault, "GET", "/out/a")
    assert shaky.read("a") == DATA


def test_an_object_that_is_replaced_while_it_is_read_is_read_anew(
    storage: S3Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("a", b"old")
    plain = S3File._get

    def replace_first(self: S3File, start: int, size: int) -> bytes:
        monkeypatch.setattr(S3File, "_get", plain)
        storage.put("a", b"newer")
        return plain(self, start, size)

    monkeypatch.setattr(S3File, "_get", replace_first)
    assert storage.read("a") == b"newer"


def test_a_get_that_is_always_damaged_is_told(shaky: S3Storage, proxy: S3Proxy) -> None:
    file = write(shaky, "a", DATA)
    proxy.always(Fault.FLIP)
    with pytest.raises(ValueError, match="other bytes than expected"):
        shaky.open_checked("a", file.sha256)
    with pytest.raises(OutputUnavailable, match="arrives damaged"):
        shaky.read("a")
    proxy.always(Fault.TRUNCATE)
    with pytest.raises(OutputUnavailable, match="can't reach .*/out/a now"):
        shaky.open_checked("a", file.sha256)


def test_a_place_that_never_answers_is_waited_for_and_no_upload_stays_after_the_sweep(
    storage: S3Storage, proxy: S3Proxy, uploads: Uploads, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.jobs.storage.s3.client.MAX_TRIES", 2)
    monkeypatch.setattr("gristmill.jobs.storage.s3.client._clients", {})
    shaky = S3Storage(f"{s3_root}/out")
    proxy.choose = lambda method, path: None if path.endswith("?uploads") else Fault.INTERNAL_ERROR
    with pytest.raises(OutputUnavailable, match="can't reach .*/out/_attempts/a now"):
        write(shaky, "_attempts/a", LARGE)
    for call in (shaky.check_writable, shaky.names, shaky.sweep, lambda: shaky.put_new("a", b"")):
        with pytest.raises(OutputUnavailable):
            call()
    assert uploads() == ["out/_attempts/a"]
    storage.sweep()
    assert (storage.names(), uploads()) == ([], [])
