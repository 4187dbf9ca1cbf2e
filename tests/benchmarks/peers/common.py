"""What every peer script shares: the work folder, the workloads, and the one JSON line it prints a workload.

The work folder is the environment variable PEERS (default: peers-work). It holds workload.jsonl, the GGUF
file as smollm2.gguf and, for the peers that read that layout, smollm2-hf/ (made by ../prepare_model.py).
"""

import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

PEERS = Path(os.environ.get("PEERS", "peers-work"))
HF_FOLDER = str(PEERS / "smollm2-hf")
WARM = bool(int(os.environ.get("WARM", "1")))  # 0: no warm-up, for runs that are timed from start to end
NUM_THREADS = int(os.environ.get("THREADS", str(len(os.sched_getaffinity(0)))))


def read_workload(folder: Path, workload: str, num_rows: int) -> list[dict]:
    """The rows of one workload in the folder's workload.jsonl, the first num_rows of them unless that is 0."""
    with open(folder / "workload.jsonl", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row["wl"] == workload]
    return rows[:num_rows] if num_rows else rows


def load(workload: str) -> list[dict]:
    """The rows of one workload, the first ROWS of them where that variable is set."""
    return read_workload(PEERS, workload, int(os.environ.get("ROWS", "0")))


def peak_of(pid: int | None) -> float:
    """Peak resident memory of a process so far, of this one without a number, in GiB."""
    status = Path(f"/proc/{pid or 'self'}/status").read_text(encoding="ascii")
    peak_kb = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return round(int(peak_kb) / 2**20, 2)


def peak_gb() -> float:
    """Peak resident memory of this process or of its largest child, in GiB."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return round(max(resource.getrusage(each).ru_maxrss for each in who) / 2**20, 2)


def check_exact(workload: str, rows: list[dict], outs: list[list[int]]) -> None:
    """End the benchmark unless every row has exactly its max_tokens tokens."""
    if len(outs) != len(rows):
        sys.exit(f"{workload}: {len(outs)} outputs for {len(rows)} rows")
    for i, (row, tokens) in enumerate(zip(rows, outs, strict=True)):
        if len(tokens) != row["max_tokens"]:
            sys.exit(f"{workload} row {i}: {len(tokens)} tokens, expected {row['max_tokens']}")


def write_parquet(outs: list[list[int]]) -> None:
    """The file that PARQUET names: index, token ids and text of every row. Does nothing without PARQUET."""
    if not (path := os.environ.get("PARQUET")):
        return
    import pyarrow
    import pyarrow.parquet
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(PEERS / "smollm2-hf" / "tokenizer.json"))
    columns = {"row": range(len(outs)), "token_ids": outs, "text": tokenizer.decode_batch(outs)}
    pyarrow.parquet.write_table(pyarrow.table({k: list(v) for k, v in columns.items()}), path)


def measure(
    peer: str, workload: str, rows: list[dict], run: Callable[[list[dict]], list[list[int]]], **more
) -> None:
    """Time the rows in this process and report them; run: ids, in row order; load_s comes among the rest."""
    cpu, start = time.process_time(), time.perf_counter()
    outs = run(rows)
    secs = time.perf_counter() - start
    more["cpu_util"] = round((time.process_time() - cpu) / secs / NUM_THREADS, 2)
    report(peer, workload, rows, outs, secs, **more)


def report(peer: str, workload: str, rows: list[dict], outs: list[list[int]], secs: float, **more) -> None:
    """Check the counts, print one workload's line, keep the tokens for compare.py. TAG ends the peer's name."""
    check_exact(workload, rows, outs)
    write_parquet(outs)
    peer += os.environ.get("TAG", "")
    more["load_s"] = round(more["load_s"], 1)
    num_prompt, num_out = sum(len(row["ids"]) for row in rows), sum(map(len, outs))
    line = {
        "peer": peer,
        "wl": workload,
        "rows": len(rows),
        "secs": round(secs, 2),
        "out_tok": num_out,
        "want_out": sum(row["max_tokens"] for row in rows),
        "prompt_tok": num_prompt,
        "out_tok_s": round(num_out / secs, 1),
        "total_tok_s": round((num_prompt + num_out) / secs, 1),
        "peak_rss_gb": peak_gb(),
        "tokens_sha256": hashlib.sha256(json.dumps(outs).encode()).hexdigest()[:16],
        **more,
    }
    folder = PEERS / "out"
    folder.mkdir(parents=True, exist_ok=True)
    name = peer.replace("/", "_").replace(" ", "_")
    (folder / f"{workload}-{name}.json").write_text(json.dumps(outs), encoding="utf-8")
    print(json.dumps(line), flush=True)
