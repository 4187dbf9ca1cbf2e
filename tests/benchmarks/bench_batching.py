"""What the batcher gains: bench_batching.py [static] [sharing] [saved] [bookkeeping]; all of them unless named.

static: continuous against static batches in file order, 1,000 rows, 8 to 512 output tokens of mean 60, 32 slots:
batches that compute every slot until the longest row ends, as generate() does, and batches that finished rows leave.
sharing: workload A with prefix sharing on and off. saved: prompt tokens not computed, against the most that can be
saved, with KV caches of 100, 30 and 10% of the shard. bookkeeping: the share of a step in which nothing is computed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from array import array
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import NamedTuple

from kit import Figures, build_parser, check_known, load_machine, load_workload, write_result

from gristmill.engine.batch.prefix import max_shared_tokens
from gristmill.engine.build import build_engine, build_random_engine
from gristmill.engine.config import BLOCK_SIZE, EngineOptions
from gristmill.engine.engine import Engine
from gristmill.worker.tools.bench.run import BenchRun, find_miscount, run_pass, warm_up
from gristmill.worker.tools.bench.shape import parse_shape
from gristmill.worker.tools.bench.workload import (
    BenchRow,
    Lengths,
    Level,
    SyntheticSpec,
    build_synthetic,
    shuffle_rows,
)

VOCAB_SIZE = 49_152
TINY = parse_shape(f"hidden=64,layers=2,heads=4,kv_heads=2,intermediate=128,vocab={VOCAB_SIZE}")
SAVED_GOALS = {
    1.0: 0.99,
    0.3: 0.97,
    0.1: 0.90,
}  # share of the shard that the KV cache holds: share of the theory
STATIC_SLOTS = 32
BOOKKEEPING_ROWS = 512
MAX_BOOKKEEPING_MS, MAX_BOOKKEEPING_SHARE = 3.0, 0.05


def workload_a(num_rows: int) -> list[BenchRow]:
    """The rows of workload A."""
    return [BenchRow(array("I", row["ids"]), row["max_tokens"]) for row in load_workload("A", num_rows)]


def build(model: str | None, options: EngineOptions) -> Engine:
    """The model at a path, or the tiny random one, warmed up by a short row."""
    engine = build_engine(model, options) if model else build_random_engine(TINY, options, "tiny")
    warm_up(engine, [BenchRow(array("I", [1]), 1)])
    return engine


def timed_pass(engine: Engine, rows: list[BenchRow], group: int) -> BenchRun:
    """One pass over all rows; ends the benchmark unless the token counts are exact."""
    run = run_pass(engine, rows, group, show=lambda _: None)
    if problem := find_miscount(rows, run):
        sys.exit(problem)
    return run


class Setting(NamedTuple):
    """One side of a comparison: an engine of its own, and the rows that it is given."""

    options: EngineOptions
    rows: list[BenchRow]


def compare(model: str | None, settings: dict[str, Setting], repeat: int) -> dict[str, list[BenchRun]]:
    """Runs the settings in turn, round after round, each on an engine of its own."""
    engines = {name: build(model, setting.options) for name, setting in settings.items()}
    runs: dict[str, list[BenchRun]] = {name: [] for name in settings}
    for number in range(repeat):
        for name, engine in engines.items():
            runs[name].append(timed_pass(engine, settings[name].rows, group=number + 1))
            seconds = runs[name][-1].seconds
            print(f"  {name}: {seconds:.1f} s, {len(runs[name][-1].steps)} steps", flush=True)
    return runs


def gain(runs: dict[str, list[BenchRun]], fast: str, slow: str, goal: float | None) -> Figures:
    """The ratio of the medians, with the goal that it is held to, if any."""
    medians = {name: statistics.median(run.seconds for run in found) for name, found in runs.items()}
    ratio = medians[slow] / medians[fast]
    print(f"{fast} is {ratio:.2f} times as fast as {slow}" + (f" (goal {goal})" if goal else ""))
    return {
        "ratio": round(ratio, 2),
        "goal": goal,
        "ok": ratio >= (goal or 0.0),
        "seconds": {name: [round(run.seconds, 2) for run in found] for name, found in runs.items()},
        "steps": {name: len(found[0].steps) for name, found in runs.items()},
    }


def hold_slots(rows: list[BenchRow], slots: int) -> list[BenchRow]:
    """The rows of each batch made as long as its longest: what a static batch computes, finished rows included."""
    batches = [rows[first : first + slots] for first in range(0, len(rows), slots)]
    return [
        replace(row, max_tokens=max(other.max_tokens for other in batch))
        for batch in batches
        for row in batch
    ]


def bench_static(args: argparse.Namespace) -> Figures:
    """Continuous against static batches in file order, judged beside those whose slots are held to their end."""
    spec = SyntheticSpec(
        args.rows or 1000, (), Lengths(20, 60), Lengths(8, 512, 60.0), VOCAB_SIZE, seed=args.seed
    )
    options = EngineOptions(dtype=args.dtype, max_num_seqs=STATIC_SLOTS, record_steps=True)
    static, rows = replace(options, static_batches=True), build_synthetic(spec)
    settings = {
        "continuous": Setting(options, rows),
        "static": Setting(static, hold_slots(rows, STATIC_SLOTS)),
        "static that rows leave": Setting(static, rows),
    }
    runs = compare(args.model, settings, args.repeat)
    figures = gain(runs, "continuous", "static", 2.0)
    return figures | {"static_that_rows_leave": gain(runs, "continuous", "static that rows leave", None)}


def bench_sharing(args: argparse.Namespace) -> Figures:
    """Workload A with sharing on and off."""
    options, rows = EngineOptions(dtype=args.dtype, record_steps=True), workload_a(args.rows)
    apart = replace(options, enable_prefix_cache=False)
    runs = compare(
        args.model, {"sharing": Setting(options, rows), "no sharing": Setting(apart, rows)}, args.repeat
    )
    return gain(runs, "sharing", "no sharing", 2.5)


def saved_workloads(num_rows: int) -> dict[str, list[BenchRow]]:
    """A, a tree of system prompt, document and question, and that tree in random order."""
    spec = SyntheticSpec(
        num_rows or 480, (Level(300, 1), Level(200, 8), Level(60, 5)), Lengths(10, 60), Lengths(8, 64), VOCAB_SIZE, 0
    )  # fmt: skip
    tree = build_synthetic(spec)
    return {"A": workload_a(num_rows), "multi-level": tree, "shuffled": shuffle_rows(tree, 0)}


def num_shard_blocks(rows: Iterable[BenchRow]) -> int:
    """Blocks of all rows at their ends, each distinct prefix counted once: what 100% of the shard means."""
    rows = list(rows)
    total = sum(len(row.token_ids) + row.max_tokens for row in rows)
    return -(-(total - max_shared_tokens(row.token_ids for row in rows)) // BLOCK_SIZE) + len(rows)


def bench_saved(args: argparse.Namespace) -> Figures:
    """Saved prompt tokens, counted on the tiny model: which tokens are computed depends on no weights."""
    cases = [
        measure_saved(name, rows, share, goal)
        for name, rows in saved_workloads(args.rows).items()
        for share, goal in SAVED_GOALS.items()
    ]
    return {"cases": cases, "ok": all(case["ok"] for case in cases)}


def measure_saved(name: str, rows: list[BenchRow], share: float, goal: float) -> Figures:
    """One workload with a KV cache of this share of the shard."""
    num_blocks = max(2, int(num_shard_blocks(rows) * share))
    options = EngineOptions(dtype="float32", num_kv_blocks=num_blocks, record_steps=True)
    counters = timed_pass(build(None, options), rows, group=1).counters
    prompts, best = sum(len(row.token_ids) for row in rows), max_shared_tokens(row.token_ids for row in rows)
    saved = prompts - counters.num_computed_prompt_tokens  # those computed again after a preemption are not
    case = {"workload": name, "rows": len(rows), "kv_share": share, "kv_blocks": num_blocks}
    case |= {"prompt_tokens": prompts, "computed": prompts - saved, "max_saved": best}
    case |= {"saved_of_max": round(saved / best, 4), "goal": goal}
    case |= {"preemptions": counters.num_preemptions, "ok": saved / best >= goal}
    print(
        f"{name}, KV {share:.0%} ({num_blocks} blocks): {saved} of {best} tokens saved, {saved / best:.2%} "
        f"(goal {goal:.0%}){'' if case['ok'] else ' MISSED'}, {counters.num_preemptions} preemptions",
        flush=True,
    )
    return case


def bench_bookkeeping(args: argparse.Namespace) -> Figures:
    """Bookkeeping of the steps in which 512 rows decode, or as many as there are."""
    num_rows = args.rows or BOOKKEEPING_ROWS
    spec = SyntheticSpec(num_rows, (Level(64, 1),), Lengths(8, 32), Lengths(40, 40), VOCAB_SIZE, seed=1)
    options = EngineOptions(dtype=args.dtype, max_num_seqs=num_rows, record_steps=True)
    run = timed_pass(build(args.model, options), build_synthetic(spec), group=1)
    steps = [step for step in run.steps if step.num_decode_tokens == num_rows]
    if not steps:
        sys.exit(f"no step decoded all {num_rows} rows")
    bookkeeping_ms = statistics.median(step.bookkeeping_s for step in steps) * 1e3
    total_ms = statistics.median(step.total_s for step in steps) * 1e3
    share = bookkeeping_ms / total_ms
    ok = bookkeeping_ms <= MAX_BOOKKEEPING_MS and share <= MAX_BOOKKEEPING_SHARE
    parts = {
        f"{part}_ms": round(statistics.median(getattr(step, f"{part}_s") for step in steps) * 1e3, 3)
        for part in ("schedule", "build", "forward", "sample", "finish")
    }
    print(
        f"{num_rows} decoding rows: {bookkeeping_ms:.2f} ms of bookkeeping (goal {MAX_BOOKKEEPING_MS}) in a step of "
        f"{total_ms:.1f} ms, {share:.1%} (goal {MAX_BOOKKEEPING_SHARE:.0%}): {parts}"
    )
    figures = {"rows": num_rows, "steps": len(steps), "bookkeeping_ms": round(bookkeeping_ms, 3)}
    return figures | {"step_ms": round(total_ms, 2), "share": round(share, 4), "ok": ok} | parts


PARTS = {
    "static": bench_static,
    "sharing": bench_sharing,
    "saved": bench_saved,
    "bookkeeping": bench_bookkeeping,
}


def main() -> None:
    parser = build_parser(__doc__, "model dtype rows repeat", "batching.json")
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; --model tiny: random weights"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    check_known(parser, "parts", args.parts, PARTS)
    args.model = None if args.model == "tiny" else args.model
    result: Figures = {"machine": load_machine(), "model": args.model or asdict(TINY)}
    for name in args.parts or PARTS:
        print(f"{name}:", flush=True)
        result[name] = PARTS[name](args)
    write_result(args.output, result)
    if missed := [name for name in args.parts or PARTS if not result[name]["ok"]]:
        sys.exit(f"goals missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
