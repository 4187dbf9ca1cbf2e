"""Gristmill's engine beside transformers' static batches, on the same machine in the same run.

Runs the workloads A, B and C (workload.jsonl) through the engine process, greedy, end of text ignored, and
fails unless every row has exactly its max_tokens. Prints a table with the ratio and writes results/cpu.json.
Without bfloat16 instructions the bfloat16 peer runs one full static batch only; the table marks such a rate.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from array import array
from dataclasses import asdict
from pathlib import Path

from kit import (
    Figures,
    build_parser,
    load_machine,
    load_workload,
    prepare_peers,
    print_table,
    write_result,
)
from peer_runs import OWN_ENVIRONMENT, Peer, run_peer
from peers.common import peak_of

from gristmill.engine.checkpoint.opening import resolve_dtype
from gristmill.engine.config import EngineOptions
from gristmill.engine.request import Completion, EngineCounters, EngineInfo, Request, SamplingParams
from gristmill.worker.engine.client import EngineClient

STATIC_BATCH = 32
LOAD_TIMEOUT_S = 300.0
PEER_TIMEOUT_S = 3 * 3600.0


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
    waiting = counters.budget_tokens_while_waiting or None
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
        "budget_utilization": waiting and round(counters.scheduled_tokens_while_waiting / waiting, 3),
        "load_s": round(info.load_s, 2),
        "peak_rss_gb": peak_of(client.pid),
        "parent_peak_rss_gb": peak_of(None),
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


def run_static(args: argparse.Namespace, dtype: str, num_rows: int) -> list[Figures]:
    """transformers' static batches in a process of their own; one dictionary a workload."""
    settings = {"DTYPE": dtype, "BS": str(STATIC_BATCH)}
    peer = Peer("transformers", OWN_ENVIRONMENT, dtype, ("peers/bench_hf.py", "static"), settings)
    figures, _ = run_peer(peer, args.workloads, args, num_rows=num_rows, timeout_s=PEER_TIMEOUT_S)
    for line in figures:
        print(json.dumps(line), flush=True)
    return figures


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


def print_figures(ours: list[Figures], peers: list[Figures]) -> None:
    """One line a workload and system, with Gristmill's rate over the peer's."""
    keys = ("rows", "prompt_tok", "cached_tok", "out_tok", "secs", "out_tok_s", "peak_rss_gb")
    lines, is_cut = [], False
    for mine in ours:
        codes = ", stored codes" if mine["quantization"] == "auto" else ""
        lines.append((f"{mine['wl']} gristmill {mine['dtype']}{codes}", *(mine[key] for key in keys), ""))
        for line in (peer for peer in peers if peer["wl"] == mine["wl"]):
            line["ratio"] = round(mine["out_tok_s"] / line["out_tok_s"], 2)
            note, few = f"{line['ratio']:.2f} times as fast", line["rows"] != mine["rows"]
            note, is_cut = note + (f" *{line['rows']} rows" if few else ""), is_cut or few
            lines.append((f"{line['wl']} {line['peer']}", *(line.get(key) for key in keys), note))
    heads = ("rows", "prompt", "cached", "output", "seconds", "out tok/s", "peak GB", "Gristmill is")
    print_table(("system", *heads), lines)
    if is_cut:
        print("* the peer ran only the first rows of the workload; rates are compared, not times")


def parse_arguments() -> argparse.Namespace:
    parser = build_parser(__doc__, "model dtype workloads rows threads peers-folder", "cpu.json")
    parser.add_argument(
        "--quantization",
        default="none",
        choices=["none", "auto"],
        help="none: dequantized weights, which is what the peers have; auto: as the file has them",
    )
    parser.add_argument("--max-num-seqs", type=int, help="rows that run together; default: the engine's")
    parser.add_argument("--peer-dtype", default="both", choices=["bfloat16", "float32", "both", "none"])
    parser.add_argument("--peer-rows", type=int, help="rows for the peers; default: all, see the file's head")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    machine, plan = load_machine(), plan_peers(args)
    if (load := machine["load_average_before"]) > 0.5:
        print(f"load average {load}: the machine is not idle, the figures will be low")
    ours = run_gristmill(args)
    if plan:
        prepare_peers(args.peers_folder, args.model)
    peers = [line for dtype, num_rows in plan for line in run_static(args, dtype, num_rows)]
    print_figures(ours, peers)
    engine_gb, parent_gb = (max(line[f"{key}peak_rss_gb"] for line in ours) for key in ("", "parent_"))
    print(
        f"\nGristmill: model loaded in {ours[0]['load_s']} s, ready after {ours[0]['ready_s']} s; "
        f"peak memory {engine_gb} GB in the engine, {parent_gb} GB in its parent; all token counts are exact"
    )
    write_result(args.output, {"machine": machine, "gristmill": ours, "peers": peers})


if __name__ == "__main__":
    main()
