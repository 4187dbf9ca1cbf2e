"""The folder of a comparison: pairs.parquet, report.html, summary.json; checked before any work, written at its end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.jobs.errors import OutputError
from gristmill.jobs.source import Source
from gristmill.worker.show.console import UsageRefused, to_json
from gristmill.worker.tools.compare.figures import Figures
from gristmill.worker.tools.compare.html import to_html
from gristmill.worker.tools.compare.pairs import Answer, Comparison, Pair

PAIRS, REPORT, SUMMARY = "pairs.parquet", "report.html", "summary.json"
SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("row_index", pa.int64()),
        ("custom_id", pa.string()),
        ("language", pa.string()),
        ("prompt", pa.string()),
        ("prompt_tokens", pa.int32()),  # A's
        *((f"answer_{side}", pa.string()) for side in "ab"),
        *((f"tokens_{side}", pa.int32()) for side in "ab"),
        *((f"finish_reason_{side}", pa.string()) for side in "ab"),
        *((f"choice_{side}", pa.string()) for side in "ab"),
        *((f"is_json_{side}", pa.bool_()) for side in "ab"),
        ("same", pa.bool_()),
        ("first_divergence", pa.int32()),
        *((f"logprob_{answer}_under_{model}", pa.float64()) for answer in "ab" for model in "ab"),
        ("kl_mean", pa.float64()),
        ("kl_max", pa.float64()),
        ("error", pa.string()),
    ]
)


def check_output(folder: str, overwrite: bool, sources: Sequence[Source]) -> Path:
    """The folder, if a comparison may be written there; it need not exist. Raises UsageRefused."""
    if "://" in folder:
        raise UsageRefused(f"--output {folder}: a comparison is written to a local folder; give one")
    path = Path(folder)
    existing = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    if not existing.is_dir():
        raise UsageRefused(f"--output {folder}: {existing} is not a folder; give another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageRefused(
            f"--output {folder}: {existing} can't be written; give another, or change its permissions"
        )
    for name in (PAIRS, REPORT, SUMMARY):
        place = path / name
        if any(os.path.realpath(place) == os.path.realpath(source.uri) for source in sources):
            raise UsageRefused(f"--output {folder}: {name} is the input; give another folder")
        if os.path.lexists(place) and not overwrite:
            raise UsageRefused(
                f"--output {folder}: {name} is there already; give another folder, or --overwrite"
            )
        if place.is_dir():
            raise UsageRefused(f"--output {folder}: {name} is a folder; give another")
    return path


def write_files(folder: Path, comparison: Comparison, payload: Figures, sources: Sequence[Source]) -> None:
    """Each file appears whole or not at all; the summary last. Raises OutputError."""
    page = to_html(comparison, payload)
    table = build_table(comparison.pairs, sources)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {name: folder / f".{name}.{os.getpid()}" for name in (PAIRS, REPORT, SUMMARY)}
        try:
            pq.write_table(table, names[PAIRS], compression="zstd")
            names[REPORT].write_text(page, encoding="utf-8")
            names[SUMMARY].write_text(to_json(payload) + "\n", encoding="utf-8")
            for name, place in names.items():
                place.replace(folder / name)
        finally:
            for place in names.values():
                place.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"{folder}: can't be written ({error.strerror or error}); free or give a place"
        ) from error


def build_table(pairs: Sequence[Pair], sources: Sequence[Source]) -> pa.Table:
    """One line a row, in input order; a row that could not run has an error and no answers."""
    return pa.Table.from_pylist([to_line(pair, sources) for pair in pairs], SCHEMA)


def to_line(pair: Pair, sources: Sequence[Source]) -> dict[str, Any]:
    """One line of pairs.parquet; what is not known is left out."""
    row = pair.row.row
    line: dict[str, Any] = {
        "source": sources[row.source_index].name,
        "row_index": row.row_index,
        "custom_id": row.custom_id,
        "language": pair.row.language,
        "prompt": pair.row.prompt,
        "error": pair.error,
    }
    if pair.a is None or pair.b is None:
        return line
    line |= {
        **to_answer_cells("a", pair.a),
        **to_answer_cells("b", pair.b),
        "prompt_tokens": len(pair.a.prompt_ids),
        "same": pair.is_same,
        "first_divergence": pair.first_divergence,
    }
    if pair.scores is not None:
        sums = ("a_under_a", "a_under_b", "b_under_a", "b_under_b")
        line |= {f"logprob_{name}": getattr(pair.scores, name) for name in sums}
        line |= {"kl_mean": float(pair.scores.kl.mean()), "kl_max": float(pair.scores.kl.max())}
    return line


def to_answer_cells(side: str, answer: Answer) -> dict[str, Any]:
    """One side's columns."""
    return {
        f"answer_{side}": answer.text,
        f"tokens_{side}": len(answer.token_ids),
        f"finish_reason_{side}": answer.finish_reason,
        f"choice_{side}": answer.choice,
        f"is_json_{side}": answer.is_json,
    }
