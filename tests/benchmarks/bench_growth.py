"""How preparing grows: 100,000 and 1,000,000 rows of 500 tokens that share prefixes, sorted into the engine's tree.

Measures what the scheduler does when rows arrive, in waves as the worker sends them, and in which order they would
run: no model and no tensor. Each size runs in a process of its own. Ten times the rows may take 13 times as long.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from array import array

import numpy as np
from kit import build_parser, load_machine, write_result

from gristmill.engine.batch.scheduler import Scheduler
from gristmill.engine.batch.sequence import Sequence
from gristmill.engine.process.serve import GC_THRESHOLDS
from gristmill.engine.request import Request, SamplingParams

ROW_TOKENS, SYSTEM_TOKENS, DOCUMENT_TOKENS, ROWS_PER_DOCUMENT = 500, 200, 200, 10
MAX_GROWTH = 13.0
SIZES = (100_000, 1_000_000)


def make_wave(first: int, num_rows: int, order: np.ndarray) -> list[Sequence]:
    """Rows of the shuffled job: a shared system prompt, a document of ten rows, a question of their own."""
    system = np.random.default_rng(0).integers(49_152, size=SYSTEM_TOKENS, dtype=np.uint32)
    rng = np.random.default_rng([1, first])
    own_tokens = ROW_TOKENS - SYSTEM_TOKENS - DOCUMENT_TOKENS
    own = rng.integers(49_152, size=(num_rows, own_tokens), dtype=np.uint32)
    sampling, rows = SamplingParams(max_tokens=64, ignore_eos=True), []
    for k in range(num_rows):
        number = int(order[first + k])
        document = np.random.default_rng([2, number // ROWS_PER_DOCUMENT])
        body = document.integers(49_152, size=DOCUMENT_TOKENS, dtype=np.uint32)
        tokens = array("I", np.concatenate([system, body, own[k]]).tobytes())
        rows.append(Sequence(Request(first + k, tokens, sampling), ROW_TOKENS + 64, 0.0))
    return rows


def measure(num_rows: int, wave_rows: int) -> dict[str, float]:
    """Seconds to add all rows, wave by wave, and to plan the order and the first step. Making the rows is not timed."""
    gc.set_threshold(*GC_THRESHOLDS)
    order = np.random.default_rng(3).permutation(num_rows)
    scheduler = Scheduler(num_blocks=8192, max_num_seqs=256, max_num_batched_tokens=1024)
    added_s, slowest_s, cpu_s = 0.0, 0.0, 0.0
    for first in range(0, num_rows, wave_rows):
        rows = make_wave(first, min(wave_rows, num_rows - first), order)
        start, cpu = time.perf_counter(), time.process_time()
        scheduler.add(rows)
        wave_s = time.perf_counter() - start
        cpu_s += time.process_time() - cpu
        added_s, slowest_s = added_s + wave_s, max(slowest_s, wave_s)
    del rows
    gc.collect()
    start, cpu = time.perf_counter(), time.process_time()
    step = scheduler.schedule()
    first_step_s = time.perf_counter() - start
    cpu_s += time.process_time() - cpu
    assert step.num_new.sum() > 0
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    figures = {"rows": num_rows, "add_s": added_s, "first_step_s": first_step_s, "slowest_wave_s": slowest_s}
    return figures | {"seconds": added_s + first_step_s, "cpu_s": cpu_s, "peak_gb": peak_gb}


def measure_apart(num_rows: int, wave_rows: int) -> dict[str, float]:
    """The same in a fresh process."""
    command = [sys.executable, __file__, "--measure", str(num_rows), "--wave-rows", str(wave_rows)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=3600.0)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = build_parser(__doc__, "repeat", "growth.json")
    parser.add_argument("--measure", type=int, help="print the figures of so many rows and end")
    parser.add_argument("--divide", type=int, default=1, help="so many times fewer rows, for a quick look")
    parser.add_argument("--wave-rows", type=int, default=10_000, help="rows handed over at a time")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.wave_rows)))
        return
    machine, sizes = load_machine(), [size // args.divide for size in SIZES]
    runs = []
    for size in sizes * args.repeat:
        runs.append(measure_apart(size, args.wave_rows))
        print({name: round(value, 3) for name, value in runs[-1].items()}, flush=True)
    small, large = (
        statistics.median(run["seconds"] for run in runs if run["rows"] == size) for size in sizes
    )
    growth = large / small
    print(f"ten times the rows take {growth:.1f} times as long (goal {MAX_GROWTH:.0f})")
    result = {"machine": machine, "runs": runs, "growth": round(growth, 2), "goal": MAX_GROWTH}
    write_result(args.output, result)
    if growth > MAX_GROWTH:
        sys.exit("goal missed: growth")


if __name__ == "__main__":
    main()
