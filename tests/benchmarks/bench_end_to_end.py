"""From the command to the last row on disk, workload A: `gristmill run` beside each peer's script.

A peer's script loads its model, takes the token ids as they are and writes a Parquet file with ids and text. Gristmill
takes JSONL with the decoded chats, so it renders and tokenizes too. Its prompt tokens are stated with each run: they
can differ by a few, where a text has another encoding than its ids. No warm-up; the page cache is warm for all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
import tokenizers
from kit import (
    GRISTMILL,
    HERE,
    Figures,
    build_parser,
    load_machine,
    load_workload,
    prepare_peers,
    write_result,
)
from peer_runs import PEER_NAMES, Peer, PeerFailed, list_peers, prepare_peer, run_peer

WORKLOAD = "A"
GOALS = {"vllm": 3.0}
GOAL_OF_FASTEST = 1.3


def to_messages(text: str) -> list[dict[str, str]]:
    """The chat that was rendered to this ChatML text; its last line, the assistant's, is left to the template."""
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", text, flags=re.DOTALL)
    return [{"role": role, "content": content} for role, content in turns]


def write_prompts(work: Path, num_rows: int, path: Path) -> None:
    """JSONL of the workload's chats."""
    tokenizer = tokenizers.Tokenizer.from_file(str(work / "smollm2-hf" / "tokenizer.json"))
    rows = load_workload(WORKLOAD, num_rows)
    texts = [tokenizer.decode(row["ids"], skip_special_tokens=False) for row in rows]
    lines = [json.dumps({"messages": to_messages(text)}) + "\n" for text in texts]
    path.write_text("".join(lines), encoding="utf-8")


def run_gristmill(args: argparse.Namespace, dtype: str, model: Path, prompts: Path, folder: Path) -> Figures:
    """One run of the command in a fresh folder; every row must be there with all its tokens."""
    rows = load_workload(WORKLOAD, args.rows)
    (max_tokens,) = {row["max_tokens"] for row in rows}
    output = folder / "out"
    command = [
        *GRISTMILL,
        "run",
        str(prompts),
        "--model",
        str(model),
        "--dtype",
        dtype,
        "--output",
        str(output),
    ]
    command += [
        "--messages", "messages", "--max-tokens", str(max_tokens), "--sampling", "ignore_eos=true",
        "--database-url", f"sqlite:///{folder / 'jobs.db'}",
    ]  # fmt: skip
    env = dict(os.environ, PYTHONPATH=str(HERE.parents[1]))
    start = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.max_run_s)
    secs = time.perf_counter() - start
    if done.returncode != 0:
        raise PeerFailed(f"ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    written = pq.read_table(output).to_pydict()
    counts = written["completion_tokens"]
    if len(counts) != len(rows) or set(counts) != {max_tokens}:
        raise PeerFailed(f"{len(counts)} rows of {len(rows)}, output tokens {sorted(set(counts))}")
    prompt_tokens = sum(written["prompt_tokens"])
    return {"seconds": round(secs, 2), "prompt_tok": prompt_tokens, "out_tok": sum(counts)}


def run_other(args: argparse.Namespace, peer: Peer, folder: Path) -> Figures:
    """A peer's whole script, with the file that it writes."""
    path = folder / "out.parquet"
    more = {"PARQUET": str(path), "WARM": "0"}
    lines, secs = run_peer(peer, WORKLOAD, args, num_rows=args.rows, timeout_s=args.max_run_s, **more)
    num_rows = pq.read_metadata(path).num_rows
    if num_rows != lines[0]["rows"]:
        raise PeerFailed(f"{num_rows} rows on disk, {lines[0]['rows']} were asked for")
    return {"seconds": round(secs, 2), "prompt_tok": lines[0]["prompt_tok"], "out_tok": lines[0]["out_tok"]}


def run_rounds(
    args: argparse.Namespace, peers: list[Peer]
) -> tuple[dict[str, list[Figures]], dict[str, str]]:
    """({system: its runs}, {system: why it has none}), interleaved."""
    model = args.peers_folder / "smollm2-hf"
    runs: dict[str, list[Figures]] = {}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as temporary:
        prompts = Path(temporary) / "prompts.jsonl"
        write_prompts(args.peers_folder, args.rows, prompts)
        for number in range(args.repeat):
            for peer in peers:
                name, folder = peer.name, Path(temporary) / f"{number}-{peer.name}"
                if name in failures:
                    continue
                folder.mkdir()
                load = round(os.getloadavg()[0], 1)
                try:
                    if peer.environment is None:
                        line = run_gristmill(args, peer.dtype, model, prompts, folder)
                    else:
                        line = run_other(args, peer, folder)
                except (PeerFailed, subprocess.TimeoutExpired) as error:
                    failures[name] = str(error)
                    print(f"{name}: {error}", flush=True)
                    continue
                runs.setdefault(name, []).append(line | {"load_average": load})
                print(f"round {number + 1}, {name}: {runs[name][-1]}", flush=True)
    return runs, failures


def judge(runs: dict[str, list[Figures]]) -> tuple[list[Figures], list[str]]:
    """(one line a system, the goals missed)."""
    medians = {name: statistics.median(run["seconds"] for run in found) for name, found in runs.items()}
    ours, others = medians.get("gristmill"), {n: s for n, s in medians.items() if n != "gristmill"}
    table, missed = [], []
    if ours is None:
        return table, ["gristmill did not run"]
    fastest = min(others, key=others.__getitem__, default=None)
    for name, seconds in medians.items():
        ratio = round(seconds / ours, 2)
        goal = GOALS.get(name, 0.0)
        if name == fastest:
            goal = max(goal, GOAL_OF_FASTEST)
        table.append({"system": name, "seconds": seconds, "gristmill_is": ratio, "goal": goal or None})
        print(f"{name:>16} {seconds:9.1f} s  {ratio:5.2f}" + (f" (goal {goal})" if goal else ""))
        if ratio < goal:
            missed.append(f"{name}: {ratio} of {goal}")
    return table, missed


def main() -> None:
    parser = build_parser(__doc__, "model rows repeat max-run-s peers-folder", "end-to-end.json")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--peers", default=",".join(PEER_NAMES))
    parser.set_defaults(threads=None)
    args = parser.parse_args()
    machine = load_machine()
    prepare_peers(args.peers_folder, args.model)
    peers = list_peers(args.peers.split(","), [args.dtype])
    for peer in peers:
        prepare_peer(peer, args.peers_folder)
    runs, failures = run_rounds(args, peers)
    table, missed = judge(runs)
    result = {"machine": machine, "workload": WORKLOAD, "dtype": args.dtype, "medians": table}
    write_result(args.output, result | {"runs": runs, "failures": failures, "missed": missed})
    if missed or failures:
        sys.exit("; ".join([*missed, *(f"{name} failed: {text}" for name, text in failures.items())]))


if __name__ == "__main__":
    main()
