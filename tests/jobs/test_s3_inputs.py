"""Inputs on a real S3 server: which objects a pattern names, the same rows as on disk, and what is fetched."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from gristmill.jobs.errors import RefusedError, SourceError, SourceUnavailable
from gristmill.jobs.input.files import stat_input
from gristmill.jobs.input.formats import parquet
from gristmill.jobs.input.reading import load_columns, load_rows
from gristmill.jobs.input.sources import load_sources
from gristmill.jobs.plan.cutting import plan_shards
from gristmill.jobs.plan.pieces import cut_pieces, join_pieces, plan_piece
from gristmill.jobs.source import Plan, Source
from gristmill.jobs.storage.s3 import listing
from gristmill.jobs.storage.s3.client import s3_client, split_s3_uri


def put(root: str, name: str, data: bytes = b'{"a": 1}\n') -> str:
    bucket, key = split_s3_uri(f"{root}/{name}")
    s3_client().put_object(Bucket=bucket, Key=key, Body=data)
    return f"{root}/{name}"


def names(root: str, *patterns: str, **options: str) -> list[str]:
    sources = load_sources([f"{root}/{pattern}" for pattern in patterns], **options)  # type: ignore[arg-type]
    return [source.uri.removeprefix(root + "/") for source in sources]


def load(uri: str) -> Source:
    return load_sources([uri])[0]


def parquet_bytes(table: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, **options)
    return buffer.getvalue()


def read(sources: list[Source], plan: Plan, *columns: str) -> Iterator[tuple[int, int, Any]]:
    for shard in plan.shards:
        for batch in load_rows(sources[shard.source_index], shard, columns):
            for row in batch:
                yield row.source_index, row.row_index, row.values or str(row.error)


IN_FOLDER = ["2024-01/e.jsonl", "a.ndjson.gz", "b.jsonl", "sub/c.parquet", "sub/deep/D.JSONL.ZST"]
HIDDEN = [".hidden.jsonl", "_attempts/x.jsonl", "_x.jsonl", "sub/.git/x.jsonl", "readme.md"]
OUTPUT = ["old/part-00000.jsonl", "old/_manifest.json"]
PATTERNS = {
    "": IN_FOLDER,
    "/": IN_FOLDER,
    "/b.jsonl": ["b.jsonl"],
    "/*.jsonl": ["_x.jsonl", "b.jsonl"],
    "/[ab].*": ["a.ndjson.gz", "b.jsonl"],
    "/[!a].jsonl": ["b.jsonl"],
    "/[^]a-].jsonl": [],
    "/?.jsonl": ["b.jsonl"],
    "/**/*.parquet": ["sub/c.parquet"],
    "/**/?.jsonl": ["2024-01/e.jsonl", "_attempts/x.jsonl", "b.jsonl"],
    "/**/part*": ["old/part-00000.jsonl"],
    "/20*": ["2024-01/e.jsonl"],
    "/20*/": ["2024-01/e.jsonl"],
    "/s*/deep": ["sub/deep/D.JSONL.ZST"],
    "/.hid*.jsonl": [".hidden.jsonl"],
    "/_attempts/x.jsonl": ["_attempts/x.jsonl"],
    "/old": ["old/part-00000.jsonl"],
    "/*o*/": ["old/part-00000.jsonl"],
    "/*d*": None,
    "/nope": [],
    "/nope*": [],
}


def found(pattern: str, root: str) -> list[str] | None:
    """Names below `root` of what the pattern stands for; None: refused for a file of unknown format."""
    try:
        return [source.uri.removeprefix(root + "/") for source in load_sources([root + pattern])]
    except RefusedError as refused:
        return None if "--input-format" in str(refused) else []


def test_a_pattern_names_the_objects_that_it_would_name_on_disk(s3_root: str, tmp_path: Path) -> None:
    for name in [*IN_FOLDER, *HIDDEN, *OUTPUT]:
        put(f"{s3_root}/in", name)
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b'{"a": 1}\n')
    put(s3_root, "in2/z.jsonl")
    put(s3_root, "in/empty/", b"")
    local = {pattern: found(pattern, f"{tmp_path}/in") for pattern in PATTERNS}
    distant = {pattern: found(pattern, f"{s3_root}/in") for pattern in PATTERNS}
    assert distant == local == PATTERNS


def test_sources_are_deduplicated_sorted_and_never_the_output(s3_root: str) -> None:
    for name in ("in/b.jsonl", "in/out/part-00000.jsonl", "in2/z.jsonl"):
        put(s3_root, name)
    assert names(s3_root, "in2", "in/b.jsonl", "in/b*", "in2/z.jsonl") == ["in/b.jsonl", "in2/z.jsonl"]
    assert names(s3_root, "in/**/*.jsonl", output=f"{s3_root}/in/out/") == ["in/b.jsonl"]
    with pytest.raises(RefusedError, match="own output"):
        names(s3_root, "in/out", output=f"{s3_root}/in/out")


def test_a_key_with_magic_letters_comes_before_a_glob(s3_root: str) -> None:
    for name in ("a[1].jsonl", "a1.jsonl", "ü x+&?.jsonl"):
        put(s3_root, name)
    assert names(s3_root, "a[1].jsonl") == ["a[1].jsonl"]
    assert names(s3_root, "a*.jsonl") == ["a1.jsonl", "a[1].jsonl"]
    source = load(f"{s3_root}/ü x+&?.jsonl")
    assert [row for _, _, row in read([source], plan_shards([source]))] == [{"a": 1}]


def test_a_listing_longer_than_a_page_is_read_whole(s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_PAGE_KEYS", 3)
    expected = [put(s3_root, f"many/{number:04}.parquet", b"x") for number in range(20)]
    assert [source.uri for source in load_sources([s3_root + "/many"])] == expected


@pytest.mark.parametrize("name", ["nope.jsonl", "no*.jsonl", "folder/"])
def test_no_match_is_refused_naming_the_pattern(s3_root: str, name: str) -> None:
    put(s3_root, "folder/readme.md")
    with pytest.raises(RefusedError, match="input") as caught:
        names(s3_root, name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_bucket_is_refused(s3_endpoint: str) -> None:
    for pattern in ("s3://no-such-bucket-here/a.jsonl", "s3://no-such-bucket-here/in/", "s3://b*/x"):
        with pytest.raises(RefusedError, match=r"no-such-bucket-here|one bucket"):
            load_sources([pattern])


def test_a_source_is_known_by_etag_size_and_first_bytes(s3_root: str) -> None:
    uri = put(s3_root, "b.jsonl", gzip.compress(b'{"a": 1}\n'))
    put(s3_root, "empty.jsonl", b"")
    before = load(uri)
    assert (before.format, before.compression) == ("jsonl", "gzip")
    assert load(f"{s3_root}/empty.jsonl").compression is None
    assert (before.size_bytes, before.version) == stat_input(uri) == stat_input(uri)
    assert before == load_sources([f"{s3_root}/b*"])[0]
    put(s3_root, "b.jsonl", b"other")
    assert load(uri).version != before.version


TEXT = b"\xef\xbb\xbf" + b"".join(b'{"a": %d, "text": "%s"}\n\n' % (n, b"x" * (n % 300)) for n in range(4000))


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.zst", "t.parquet"])
def test_the_rows_are_those_of_the_same_file_on_disk(s3_root: str, tmp_path: Path, name: str) -> None:
    if name.endswith("parquet"):
        texts = ["x" * (n % 300) for n in range(4000)]
        data = parquet_bytes(pa.table({"a": range(4000), "text": texts}), row_group_size=700)
    else:
        data = {"gz": gzip.compress, "zst": zstandard.compress}.get(name[6:].strip("."), bytes)(TEXT)  # type: ignore[operator]
    (tmp_path / name).write_bytes(data)
    local, distant = load(str(tmp_path / name)), load(put(s3_root, name, data))
    plan = plan_shards([local])
    assert plan_shards([distant]) == plan
    assert load_columns([distant]) == load_columns([local])
    assert list(read([distant], plan, "a", "text")) == list(read([local], plan, "a", "text"))
    pieces = cut_pieces([distant], 100_000)
    joined = join_pieces(pieces, [plan_piece(distant, piece, 500) for piece in pieces])
    assert list(read([distant], joined, "a", "text")) == list(read([local], plan, "a", "text"))


def test_an_object_uploaded_in_parts_is_read(s3_root: str) -> None:
    bucket, key = split_s3_uri(f"{s3_root}/parts.jsonl")
    client = s3_client()
    upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    place = {"Bucket": bucket, "Key": key, "UploadId": upload}
    bodies = [b'{"a": 1}\n' * 600_000, b'{"a": 2}\n' * 10]
    parts = [
        {"PartNumber": number, "ETag": client.upload_part(**place, PartNumber=number, Body=body)["ETag"]}
        for number, body in enumerate(bodies, 1)
    ]
    client.complete_multipart_upload(**place, MultipartUpload={"Parts": parts})
    source = load(f"{s3_root}/parts.jsonl")
    assert source == load_sources([f"{s3_root}/pa*"])[0]
    assert plan_shards([source], 65536).num_rows == 600_010


def test_a_shard_fetches_its_own_bytes_only(s3_root: str, fetched: list[int]) -> None:
    source = load(put(s3_root, "a.jsonl", b'{"a": "%s"}\n' % (b"x" * 988) * 20_000))
    plan = plan_shards([source], 5000)
    fetched.clear()
    assert len(list(read([source], Plan(plan.shards[1:2], 5000)))) == 5000
    assert sum(fetched) == plan.shards[1].byte_size
    assert len(fetched) <= 6  # it reads on, so each GET is larger than the one before


def test_only_the_wanted_columns_of_a_parquet_file_are_fetched(s3_root: str, fetched: list[int]) -> None:
    wide = pa.table({"a": range(100_000), "big": [f"{n:0200}" for n in range(100_000)], "z": range(100_000)})
    data = parquet_bytes(wide, row_group_size=50_000, compression="none", use_dictionary=False)
    source = load(put(s3_root, "a.parquet", data))
    assert len(data) > 20 << 20
    assert plan_shards([source], 65536).num_rows == 100_000
    assert sum(fetched) <= 128 << 10  # the footer
    fetched.clear()
    rows = list(read([source], plan_shards([source], 65536), "a", "z"))
    assert rows[99_999] == (0, 99_999, {"a": 99_999, "z": 99_999})
    assert sum(fetched) < 1.3 * 16 * 100_000 + (256 << 10)


def test_a_changed_or_lost_object_is_never_read_as_the_old_one(s3_root: str) -> None:
    uri = put(s3_root, "a.jsonl", b'{"a": 1}\n')
    source = load(uri)
    plan = plan_shards([source])
    put(s3_root, "a.jsonl", b'{"a": 2}\n')
    with pytest.raises(SourceError, match="changed since the job was planned") as caught:
        list(read([source], plan))
    assert not isinstance(caught.value, SourceUnavailable)
    bucket, key = split_s3_uri(uri)
    s3_client().delete_object(Bucket=bucket, Key=key)
    with pytest.raises(SourceError, match="is gone"):
        list(read([source], plan))


def test_a_fault_inside_arrow_keeps_its_kind(s3_root: str) -> None:
    data = parquet_bytes(pa.table({"a": [f"{n:090}" for n in range(40_000)]}), compression="none")
    source = load(put(s3_root, "a.parquet", data))
    shard = plan_shards([source], 65536).shards[0]
    batches = load_rows(source, shard, ["a"])
    next(batches)
    put(s3_root, "a.parquet", data[:-1] + b"X")
    with pytest.raises(SourceError, match="changed since the job was planned"):
        list(batches)
    packed = load(put(s3_root, "a.jsonl.gz", gzip.compress(TEXT)))
    put(s3_root, "a.jsonl.gz", gzip.compress(TEXT[:-1]))
    with pytest.raises(RefusedError, match="changed since"):
        plan_shards([packed])


def test_a_damaged_object_is_refused(s3_root: str) -> None:
    source = load(put(s3_root, "a.parquet", b"PAR1 is not all"))
    for check in (load_columns, plan_shards):
        with pytest.raises(RefusedError, match=r"a\.parquet.*as Parquet"):
            check([source])


def test_a_store_that_does_not_answer_is_unavailable(s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = load(put(s3_root, "a.jsonl"))
    packed = load(put(s3_root, "a.parquet", parquet_bytes(pa.table({"a": [1]}))))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("gristmill.jobs.storage.s3.client.MAX_TRIES", 1)
    attempts = [
        lambda: load_sources([source.uri]),
        lambda: load_sources([s3_root + "/*"]),
        lambda: plan_shards([source]),
        lambda: plan_shards([packed]),
        lambda: load_columns([packed]),
        lambda: load_columns([source]),
        lambda: plan_piece(source, cut_pieces([source], 2)[1], 5),
    ]
    for attempt in attempts:
        with pytest.raises(SourceUnavailable):
            attempt()


def test_a_cursor_goes_on_without_opening_the_object_again(
    s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = load(put(s3_root, "a.parquet", parquet_bytes(pa.table({"n": range(10_000)}))))
    opened = []
    plan = plan_shards([source], 500)
    monkeypatch.setattr(parquet, "_open_file", lambda file: opened.append(file) or pq.ParquetFile(file))
    assert [row["n"] for _, _, row in read([source], plan, "n")] == list(range(10_000))
    assert len(opened) == 1
