"""What a job's output holds, read as any reader would: the part-* files of a folder or S3 prefix, nothing else."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from examples.cluster.servers import S3Server

COMPARED = ("completion", "finish_reason", "prompt_tokens", "completion_tokens", "error_code")
RowId = tuple[str, int]  # the source's URI, the row's index in it


@dataclass(frozen=True, slots=True)
class RowReport:
    """Which rows are missing, there twice, or there without having been asked for."""

    num_rows: int
    lost: tuple[RowId, ...]
    doubled: tuple[RowId, ...]
    unknown: tuple[RowId, ...]

    @property
    def is_whole(self) -> bool:
        return not (self.lost or self.doubled or self.unknown)

    def __str__(self) -> str:
        faults = {"lost": self.lost, "doubled": self.doubled, "unknown": self.unknown}
        texts = [f"{len(ids)} {name} (first {ids[0]})" for name, ids in faults.items() if ids]
        return f"{self.num_rows} rows: " + (", ".join(texts) or "each once")


def read_files(output: str, s3: S3Server | None = None) -> dict[str, bytes]:
    """Every file of the output by its path below it; of S3 straight from the server, past any proxy."""
    if not output.startswith("s3://"):
        root = Path(output)
        files = sorted(path for path in root.rglob("*") if path.is_file())
        return {str(path.relative_to(root)): path.read_bytes() for path in files}
    assert s3 is not None, "reading an output in S3 takes the server"
    bucket, _, prefix = output.removeprefix("s3://").partition("/")
    found = {}
    with s3.client() as client:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/"):
            for entry in page.get("Contents", []):
                body = client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
                found[entry["Key"].removeprefix(f"{prefix}/")] = body
    return found


def read_rows(output: str, s3: S3Server | None = None) -> list[dict[str, Any]]:
    """The rows of the part files, by source and row."""
    rows = [
        row
        for name, content in read_files(output, s3).items()
        if name.startswith("part-")
        for row in _rows_of(name, content)
    ]
    return sorted(rows, key=lambda row: (row["source"], row["row_index"]))


def _rows_of(name: str, content: bytes) -> Iterator[dict[str, Any]]:
    if name.endswith(".jsonl"):
        return (json.loads(line) for line in content.splitlines())
    table: pa.Table = pq.read_table(io.BytesIO(content))
    return iter(table.to_pylist())


def check_rows(output: str, expected: Iterable[RowId], s3: S3Server | None = None) -> RowReport:
    """The rows that are there against those that should be."""
    present = Counter((row["source"], row["row_index"]) for row in read_rows(output, s3))
    wanted = set(expected)
    return RowReport(
        num_rows=present.total(),
        lost=tuple(sorted(wanted - present.keys())),
        doubled=tuple(sorted(row_id for row_id, count in present.items() if count > 1)),
        unknown=tuple(sorted(present.keys() - wanted)),
    )


def comparable(output: str, s3: S3Server | None = None) -> list[tuple[Any, ...]]:
    """What must be equal in two runs over the same rows, whatever the sources' place, the shards and the faults."""
    rows = read_rows(output, s3)
    return [
        (row["source"].rsplit("/", 1)[1], row["row_index"], *(row[name] for name in COMPARED)) for row in rows
    ]


def pending_uploads(output: str, s3: S3Server) -> list[str]:
    """Keys of multipart uploads that somebody began and never ended."""
    bucket, _, prefix = output.removeprefix("s3://").partition("/")
    with s3.client() as client:
        answer = client.list_multipart_uploads(Bucket=bucket)
    return [upload["Key"] for upload in answer.get("Uploads", []) if upload["Key"].startswith(prefix)]
