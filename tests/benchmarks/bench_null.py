"""The pipeline without a model: a Parquet file of a million rows through `gristmill run --model null:`.

Measures rows/s of the whole command (best of three), the memory of parent and engine process every half
second, and how long a status query takes meanwhile in a process of its own. Leaves nothing behind.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from kit import GRISTMILL, HERE, Figures, build_parser

SAMPLE_S = 0.5
CHUNK_ROWS = 50_000
TEXT_BYTES = 192  # with the 8 bytes of the id: 200 a row
WORDS = "invoice router refund invite export webhook ledger parcel cursor seat token region audit".split()
Sample = tuple[float, dict[str, int]]  # seconds since the start, resident bytes by role


def write_rows(path: Path, num_rows: int) -> None:
    """A Parquet file of (id, prompt), every prompt TEXT_BYTES long and different, in bounded memory."""
    rng = np.random.default_rng(20261129)
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, CHUNK_ROWS):
            ids = range(start, min(start + CHUNK_ROWS, num_rows))
            picks = rng.integers(0, len(WORDS), size=(len(ids), 32))
            prompts = [
                f"{i} {' '.join(WORDS[k] for k in row)}"[:TEXT_BYTES].ljust(TEXT_BYTES, ".")
                for i, row in zip(ids, picks, strict=True)
            ]
            writer.write_table(pa.table({"id": pa.array(ids, pa.int64()), "prompt": prompts}, schema=schema))


def resident_bytes(parent: psutil.Process) -> dict[str, int]:
    """Resident memory of the command and of its engine process; empty once it is gone."""
    try:
        engines = [child.memory_info().rss for child in parent.children(recursive=True)]
        return {"parent": parent.memory_info().rss, "engine": sum(engines)}
    except psutil.NoSuchProcess:
        return {}


def slope_mb_per_min(samples: list[Sample], role: str) -> float | None:
    """Growth over the second half of the run, by least squares; None when there is too little to fit."""
    half = samples[len(samples) // 2 :]
    if len(half) < 4:
        return None
    times = np.array([at for at, _ in half])
    sizes = np.array([size[role] for _, size in half]) / 2**20
    return round(float(np.polyfit(times, sizes, 1)[0]) * 60, 1)


def run_once(source: Path, folder: Path, args: argparse.Namespace) -> Figures:
    """One run of the command in a fresh folder with a fresh database."""
    folder.mkdir()
    url, output = f"sqlite:///{folder / 'jobs.db'}", folder / "out"
    command = [*GRISTMILL, "run", str(source), "--model", args.model, "--output", str(output)]
    command += ["--database-url", url, "--max-tokens", str(args.max_tokens)]
    probe_command = [sys.executable, str(HERE / "status_probe.py"), url, str(output)]
    with open(folder / "log", "w", encoding="utf-8") as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log)
        probe = subprocess.Popen(probe_command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        samples: list[Sample] = []
        parent = psutil.Process(process.pid)
        while process.poll() is None:
            if sizes := resident_bytes(parent):
                samples.append((time.perf_counter() - start, sizes))
            try:
                process.wait(SAMPLE_S)
            except subprocess.TimeoutExpired:
                continue
        secs = time.perf_counter() - start
    answer, _ = probe.communicate(timeout=30)
    if process.returncode != 0:
        sys.exit(
            f"gristmill run ended with {process.returncode}:\n{(folder / 'log').read_text(encoding='utf-8')}"
        )
    num_rows = ds.dataset(output, format="parquet").count_rows()
    if num_rows != args.rows:
        sys.exit(f"{num_rows} rows came out, {args.rows} went in")
    figures: Figures = {"rows": num_rows, "secs": round(secs, 2), "rows_per_s": round(num_rows / secs)}
    for role in ("parent", "engine"):
        peak = max((sizes[role] for _, sizes in samples), default=0)
        figures[f"{role}_peak_mb"] = round(peak / 2**20)
        figures[f"{role}_slope_mb_per_min"] = slope_mb_per_min(samples, role)
    figures |= json.loads(answer)
    return figures


def main() -> None:
    """Build the file, run the command, print one JSON line a run and the best."""
    parser = build_parser(__doc__, "")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default="null:")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as temporary:
        folder = Path(temporary)
        write_rows(folder / "rows.parquet", args.rows)
        size = (folder / "rows.parquet").stat().st_size
        print(
            f"{args.rows} rows, {size / args.rows:.0f} bytes a row on disk, {8 + TEXT_BYTES} in memory",
            flush=True,
        )
        runs = []
        for k in range(args.runs):
            runs.append(run_once(folder / "rows.parquet", folder / f"run{k}", args))
            print(json.dumps(runs[-1]), flush=True)
    best = max(run["rows_per_s"] for run in runs)
    memory = max(run["parent_peak_mb"] + run["engine_peak_mb"] for run in runs)
    status = max(run["status_max_ms"] or 0 for run in runs)
    print(f"best {best} rows/s (goal 10000), memory of both {memory} MB (goal 600), status {status} ms (50)")


if __name__ == "__main__":
    main()
