"""What a job from the queue may not touch."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.storage.allowed import check_allowed


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    "name", ["", "/", "/a.jsonl", "/deep/er/a.jsonl", "/*.jsonl", "/**/a[1]*.parquet", "/x/../a.jsonl"]
)
def test_what_lies_below_a_root_is_allowed(data: Path, name: str) -> None:
    check_allowed([f"{data}{name}", f"file://{data}{name}"], ["s3://other", str(data)])
    check_allowed([f"{data}{name}"], [f"file://{data}/"])
    check_allowed([f"s3://bucket/in{name}"], ["s3://bucket/in"])
    check_allowed([f"s3://bucket/in{name}"], ["s3://bucket/in/"])
    check_allowed([f"s3://bucket/in{name}"], ["s3://bucket"])
    check_allowed([f"s3://bucket/in{name}"], ["s3://"])


@pytest.mark.parametrize(
    "uri",
    [
        "/etc/passwd",
        "file:///etc/passwd",
        "file:///",
        "{data}/../secret",
        "{data}/*/../../secret",
        "{data}2/a.jsonl",
        "{data}*/a.jsonl",
        "s3://bucket/input/a",
        "s3://bucket/in*",
        "s3://bucket/other",
        "s3://bucket",
        "s3://bucket2/in/a",
        "S3://bucket/in/a",
        "https://bucket/in/a",
        "gs://bucket/in/a",
        "FILE:///etc/passwd",
    ],
)
def test_what_does_not_is_refused_naming_it_and_the_roots(data: Path, uri: str) -> None:
    uri = uri.format(data=data)
    with pytest.raises(RefusedError, match="not below what this worker may use") as caught:
        check_allowed([str(data), uri], [str(data), "s3://bucket/in"])
    assert repr(uri) in str(caught.value) and "s3://bucket/in" in str(caught.value)


@pytest.mark.parametrize("uri", ["a.jsonl", "", "file://host/a.jsonl", "~/a.jsonl", "/data\0/a"])
def test_a_path_that_is_not_absolute_is_refused(uri: str) -> None:
    with pytest.raises(RefusedError, match="absolute path"):
        check_allowed([uri], ["/"])


def test_a_link_is_judged_by_where_it_leads(data: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (data / "out").symlink_to(secret)
    (tmp_path / "alias").symlink_to(data)
    with pytest.raises(RefusedError):
        check_allowed([f"{data}/out/a.jsonl"], [str(data)])
    check_allowed([f"{tmp_path}/alias/a.jsonl"], [str(data)])
    check_allowed([f"{data}/a.jsonl"], [f"{tmp_path}/alias"])


def test_without_roots_nothing_is_allowed() -> None:
    with pytest.raises(RefusedError, match=r"\(nothing\)"):
        check_allowed(["/data"], [])
