"""Gristmill's engine beside transformers' static batches, on the same machine in the same run.

Runs the workloads A, B and C (workload.jsonl) through the engine process, greedy, end of text ignored, and
fails unless every row has exactly its max_tokens. Prints a table with the ratio and writes results/cpu.json.
Without bfloat16 instructions the bfloat16 peer runs one full static batch only; the table marks such a rate.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from array import array
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gristmill.engine.checkpoint.opening import resolve_dtype
from gristmill.engine.config import EngineOptions
from gristmill.engine.request import Completion, EngineCounters, EngineInfo, Request, SamplingParams
from gristmill.worker.engine.client import EngineClient

HERE = Path(__file__).resolve().parent
STATIC_BATCH = 32
LOAD_TIMEOUT_S = 300.0
PEER_TIMEOUT_S = 3 * 3600.0
Figures = dict[str, Any]


def load_workload(name: str, num_rows: int) -> list[Figures]:
    """The rows of one workload, the first num_rows of them unless that is 0."""
    with open(HERE / "workload.jsonl", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row["wl"] == name]
    return rows[:num_rows] if num_rows else rows


def peak_gb(pid: int | None) -> float:
    """Peak resident memory of a process so far, in GiB."""
    status = Path(f"/proc/{pid or 'self'}/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 2**20


def complete_all(client: EngineClient, rows: list[Figures], first_id: int) -> dict[int, Completion]:
    """Hand all rows over and wait for all of them; completions by row."""
    requests = [
        Request(
            request_id=first_id + i,
            prompt_token_ids=array("I", row["ids"]),
            sampling=SamplingParams(max_tokens=row["max_tokens"], ignore_eos=True),
        )
        for i, row in enumerate(rows)
    ]
    done: dict[int, Completion] = {}
    client.add(requests)
    while len(done) < len(requests):
        for completion in client.poll(1.0):
            done[completion.request_id - first_id] = completion
    return done


def check_exact(workload: str, rows: list[Figures], done: dict[int, Completion]) -> None:
    """End the benchmark unless every row has exactly its max_tokens tokens."""
    for i, row in enumerate(rows):
        completion = done[i]
        counts = {len(completion.token_ids), completion.num_output_tokens}
        if completion.error_code or counts != {row["max_tokens"]}:
            sys.exit(
                f"{workload} {i}: {completion.num_output_tokens} tokens, {len(completion.token_ids)} ids; "
                f"expected {row['max_tokens']}: {completion.finish_reason} {completion.error_message or ''}"
            )


def counters_after(client: EngineClient, num_output: int) -> EngineCounters:
    """The engine's counters once they include everything; progress comes every half second."""
    deadline = time.monotonic() + 5.0
    while client.counters.num_output_tokens < num_output and time.monotonic() < deadline:
        client.poll(0.2)
    return client.counters


def run_workload(client: EngineClient, info: EngineInfo, name: str, rows: list[Figures]) -> Figures:
    """One timed workload on a warm engine."""
    before = counters_after(client, 0)
    start = time.perf_counter()
    done = complete_all(client, rows, first_id=ord(name) * 1_000_000)
    secs = time.perf_counter() - start
    check_exact(name, rows, done)
    num_out = sum(row["max_tokens"] for row in rows)
    num_prompt = sum(len(row["ids"]) for row in rows)
    num_cached = sum(completion.num_cached_tokens for completion in done.values())
    counters = counters_after(client, before.num_output_tokens + num_out).minus(before)
    waiting = counters.budget_tokens_while_waiting
    return {
        "peer": "gristmill",
        "dtype": info.dtype,
        "wl": name,
        "rows": len(rows),
        "secs": round(secs, 2),
        "out_tok": num_out,
        "prompt_tok": num_prompt,
        "cached_tok": num_cached,
        "out_tok_s": round(num_out / secs, 1),
        "total_tok_s": round((num_prompt + num_out) / secs, 1),
        "steps": counters.num_steps,
        "preemptions": counters.num_preemptions,
        "kv_waste": round(counters.kv_waste_sum / max(1, counters.kv_waste_samples), 4),
        "budget_utilization": round(counters.scheduled_tokens_while_waiting / waiting, 3)
        if waiting
        else None,
        "load_s": round(info.load_s, 2),
        "peak_rss_gb": round(peak_gb(client.pid), 2),
        "parent_peak_rss_gb": round(peak_gb(None), 2),
    }


def run_gristmill(args: argparse.Namespace) -> list[Figures]:
    """Start the engine process, warm it up on four tokens, time each workload."""
    options = EngineOptions(
        dtype=args.dtype,
        quantization=args.quantization,
        max_num_seqs=args.max_num_seqs,
        num_threads=args.threads,
    )
    client = EngineClient(args.model, options)
    start = time.perf_counter()
    client.start()
    try:
        info = client.wait_loaded(LOAD_TIMEOUT_S, lambda: False)
        ready_s = round(time.perf_counter() - start, 2)
        complete_all(client, [dict(load_workload("C", 1)[0], max_tokens=4)], first_id=0)
        figures = []
        for name in args.workloads:
            figures.append(run_workload(client, info, name, load_workload(name, args.rows)))
            figures[-1] |= {"quantization": args.quantization, "ready_s": ready_s}
            figures[-1] |= {"engine": asdict(info) | {"model": Path(args.model).name}}
            print(json.dumps(figures[-1]), flush=True)
        return figures
    finally:
        client.close()


def prepare_peers(folder: Path, model: str) -> None:
    """Fill the peers' work folder: the workload, the model file, the model in Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(HERE / "workload.jsonl", folder / "workload.jsonl")
    link, target = folder / "smollm2.gguf", Path(model).resolve()
    if not link.exists() or link.resolve() != target:
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        shutil.rmtree(folder / "smollm2-hf", ignore_errors=True)
    if not (folder / "smollm2-hf" / "model.safetensors").exists():
        command = [sys.executable, str(HERE / "prepare_model.py"), str(link), str(folder / "smollm2-hf")]
        subprocess.run(command, check=True, timeout=PEER_TIMEOUT_S, stdout=subprocess.DEVNULL)


def run_peer(args: argparse.Namespace, dtype: str, num_rows: int) -> list[Figures]:
    """transformers' static batches in a process of their own; one dictionary a workload."""
    env = dict(
        os.environ, PEERS=str(args.peers_folder), DTYPE=dtype, BS=str(STATIC_BATCH), ROWS=str(num_rows)
    )
    if args.threads:
        env["THREADS"] = str(args.threads)
    command = [sys.executable, str(HERE / "peers" / "bench_hf.py"), "static", args.workloads]
    done = subprocess.run(
        command, env=env, check=True, timeout=PEER_TIMEOUT_S, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, end="", flush=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def plan_peers(args: argparse.Namespace) -> list[tuple[str, int]]:
    """(dtype, rows) of each peer run. Without bfloat16 instructions, bfloat16 gets one full batch only."""
    if args.peer_dtype == "none":
        return []
    slow = resolve_dtype("auto") != "bfloat16"
    dtypes = ["bfloat16", "float32"] if args.peer_dtype == "both" else [args.peer_dtype]
    plan = []
    for dtype in dtypes:
        num_rows = args.peer_rows if args.peer_rows is not None else args.rows
        if args.peer_rows is None and dtype == "bfloat16" and slow:
            num_rows = min(args.rows or STATIC_BATCH, STATIC_BATCH)
            print(f"this CPU has no bfloat16 instructions: the bfloat16 peer runs {num_rows} rows a workload")
        plan.append((dtype, num_rows))
    return plan


def print_table(ours: list[Figures], peers: list[Figures]) -> None:
    """One line a workload and system, with Gristmill's rate over the peer's."""
    head = (
        "",
        "system",
        "rows",
        "prompt",
        "cached",
        "output",
        "seconds",
        "out tok/s",
        "peak GB",
        "Gristmill is",
    )
    widths = (2, 38, 5, 8, 8, 7, 9, 10, 8, 24)
    print("\n" + " ".join(text.rjust(width) for text, width in zip(head, widths, strict=True)))
    for mine in ours:
        for line in [mine, *(peer for peer in peers if peer["wl"] == mine["wl"])]:
            note = ""
            if line is not mine:
                line["ratio"] = round(mine["out_tok_s"] / line["out_tok_s"], 2)
                note = f"{line['ratio']:.2f} times as fast"
                note += f" *{line['rows']} rows" if line["rows"] != mine["rows"] else ""
            name = line["peer"]
            if line is mine:
                name += f" {mine['dtype']}" + (", stored codes" if mine["quantization"] == "auto" else "")
            cells = (line["wl"], name, line["rows"], line["prompt_tok"], line.get("cached_tok", "-"))
            rest = (line["out_tok"], line["secs"], line["out_tok_s"], line["peak_rss_gb"], note)
            print(" ".join(str(cell).rjust(width) for cell, width in zip(cells + rest, widths, strict=True)))
    rows_of = {mine["wl"]: mine["rows"] for mine in ours}
    if any(peer["rows"] != rows_of[peer["wl"]] for peer in peers):
        print("* the peer ran only the first rows of the workload; rates are compared, not times")


def load_machine() -> Figures:
    """What the figures were measured on."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    flags = set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": [flag for flag in wanted if flag in flags],
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "load_average_before": round(os.getloadavg()[0], 1),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="models/smollm2-135m-instruct.gguf", help="GGUF file of SmolLM2")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument(
        "--quantization",
        default="none",
        choices=["none", "auto"],
        help="none: dequantized weights, which is what the peers have; auto: as the file has them",
    )
    parser.add_argument("--max-num-seqs", type=int, help="rows that run together; default: the engine's")
    parser.add_argument("--workloads", default="ABC")
    parser.add_argument("--rows", type=int, default=0, help="only the first rows of each workload; 0: all")
    parser.add_argument("--peer-dtype", default="both", choices=["bfloat16", "float32", "both", "none"])
    parser.add_argument("--peer-rows", type=int, help="rows for the peers; default: all, see the file's head")
    parser.add_argument("--peers-folder", type=Path, default=Path(os.environ.get("PEERS", "peers-work")))
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "cpu.json")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    machine, plan = load_machine(), plan_peers(args)
    if machine["load_average_before"] > 0.5:
        print(
            f"load average {machine['load_average_before']}: the machine is not idle, the figures will be low"
        )
    ours = run_gristmill(args)
    peers: list[Figures] = []
    if plan:
        prepare_peers(args.peers_folder, args.model)
    for dtype, num_rows in plan:
        peers += run_peer(args, dtype, num_rows)
    print_table(ours, peers)
    engine_gb, parent_gb = (max(line[f"{key}peak_rss_gb"] for line in ours) for key in ("", "parent_"))
    print(
        f"\nGristmill: model loaded in {ours[0]['load_s']} s, ready after {ours[0]['ready_s']} s; "
        f"peak memory {engine_gb} GB in the engine, {parent_gb} GB in its parent; all token counts are exact"
    )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine, "gristmill": ours, "peers": peers}
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"written: {os.path.relpath(args.output)}")


if __name__ == "__main__":
    main()
