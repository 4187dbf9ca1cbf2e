"""Which files an input names."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path

import pytest
import zstandard

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.input.sources import load_sources


def write(path: Path, data: bytes = b'{"a": 1}\n') -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def names(folder: Path, *inputs: str, **options: str) -> list[str]:
    sources = load_sources([str(folder / name) for name in inputs], **options)  # type: ignore[arg-type]
    return [os.path.relpath(source.uri, folder) for source in sources]


def test_a_folder_gives_files_with_known_extensions_only(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.ndjson.gz", "sub/c.parquet", "D.JSONL.ZST"):
        write(tmp_path / name)
    for name in (
        ".hidden.jsonl",
        "_part.jsonl",
        "_attempts/x.jsonl",
        ".git/x.jsonl",
        "readme.md",
        "x.json",
        "y.csv",
    ):
        write(tmp_path / name)
    assert names(tmp_path, "") == ["D.JSONL.ZST", "a.ndjson.gz", "b.jsonl", "sub/c.parquet"]
    assert names(tmp_path, "", input_format="parquet") == ["sub/c.parquet"]


def test_sources_are_absolute_deduplicated_and_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        write(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    sources = load_sources(["./b.jsonl", "*.jsonl", ".", str(tmp_path / "a.jsonl")])
    assert [source.uri for source in sources] == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert sources[0].size_bytes == 9 and sources[0].name == "a.jsonl"


def test_a_glob_is_expanded_but_a_file_of_that_name_comes_first(tmp_path: Path) -> None:
    for name in ("a[1].jsonl", "a1.jsonl", "deep/er/z.jsonl"):
        write(tmp_path / name)
    assert names(tmp_path, "a[1].jsonl") == ["a[1].jsonl"]
    assert names(tmp_path, "**/*.jsonl") == ["a1.jsonl", "a[1].jsonl", "deep/er/z.jsonl"]
    assert names(tmp_path, "de*") == ["deep/er/z.jsonl"]


def test_the_version_changes_with_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    before = load_sources([str(path)])[0]
    os.utime(path, ns=(1, 1))
    assert load_sources([str(path)])[0].version != before.version


def test_compression_is_known_by_content_not_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", gzip.compress(b"x"))
    write(tmp_path / "b.jsonl.gz", b"plain\n")
    write(tmp_path / "c.jsonl.zst", zstandard.compress(b"x"))
    write(tmp_path / "d.jsonl", b"")
    assert [s.compression for s in load_sources([str(tmp_path)])] == ["gzip", None, "zstd", None]


@pytest.mark.parametrize("name", ["nope.jsonl", "no*.jsonl", "empty"])
def test_no_match_is_refused_naming_the_pattern(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RefusedError) as caught:
        load_sources([str(tmp_path / name)])
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_format_is_refused_with_the_option_that_helps(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.txt")
    with pytest.raises(RefusedError, match=r"rows\.txt.*--input-format"):
        load_sources([str(path)])
    assert load_sources([str(path)], "jsonl")[0].format == "jsonl"


def test_what_is_no_readable_local_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(RefusedError, match="regular file"):
        load_sources([str(tmp_path / "pipe.jsonl")])
    (tmp_path / "broken.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(RefusedError, match=r"can't read.*broken\.jsonl"):
        load_sources([str(tmp_path / "broken.jsonl")])
    with pytest.raises(RefusedError, match="only local files and s3://"):
        load_sources(["gs://bucket/a.jsonl"])


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = os.fsdecode(os.path.join(os.fsencode(str(tmp_path)), b"\xff.jsonl"))
    try:
        Path(path).write_bytes(b"")
    except OSError:
        if sys.platform == "linux":  # its file systems take any bytes: there the test must run
            raise
        pytest.skip("this file system has UTF-8 names only")
    with pytest.raises(RefusedError, match="not valid UTF-8"):
        load_sources([str(tmp_path)])


def test_output_is_never_input(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / "out" / "part-00000.jsonl")
    write(tmp_path / "old" / "part-00000.jsonl")
    write(tmp_path / "old" / "_manifest.json")
    assert names(tmp_path, "", output=str(tmp_path / "out")) == ["a.jsonl"]
    assert names(tmp_path, "old") == ["old/part-00000.jsonl"]
    with pytest.raises(RefusedError, match="own output"):
        load_sources([str(tmp_path / "out")], output=str(tmp_path / "out"))
