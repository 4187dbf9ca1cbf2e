"""The figures of a benchmark: as a dictionary for `--json`, and as a table made from that dictionary."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gristmill.engine.config import ModelConfig
from gristmill.engine.measure.roofline import MachineRates, StoredBits, estimate_run
from gristmill.engine.request import EngineInfo
from gristmill.worker.show.tables import to_fields_text, to_number_text, to_seconds_text, to_share_text
from gristmill.worker.tools.bench.run import BenchRun, pick_median
from gristmill.worker.tools.bench.workload import BenchRow

PARTS = ("schedule", "build", "forward", "sample", "finish")
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All that was measured, and what it is held against."""

    config: ModelConfig
    info: EngineInfo
    rates: MachineRates
    rows: Sequence[BenchRow]
    runs: Sequence[BenchRun]
    max_saved_tokens: int

    @property
    def median(self) -> BenchRun:
        return pick_median(self.runs)


def to_bench_payload(result: BenchResult) -> Figures:
    """What `bench --json` prints: the figures of the median run. Shares lie in 0..1, durations are seconds."""
    run = result.median
    num_prompt = sum(len(row.token_ids) for row in result.rows)
    num_output = sum(row.max_tokens for row in result.rows)
    return {
        "model": result.info.model,
        "dtype": result.info.dtype,
        "rows": len(result.rows),
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "counts_exact": True,
        "seconds": run.seconds,
        "output_tokens_per_s": num_output / run.seconds,
        "total_tokens_per_s": (num_prompt + num_output) / run.seconds,
        "runs_output_tokens_per_s": [num_output / each.seconds for each in result.runs],
        "prefix": to_prefix_figures(run, num_prompt, result.max_saved_tokens),
        "preemptions": run.counters.num_preemptions,
        "occupancy": to_occupancy_figures(run, result.info),
        "roofline": to_roofline_figures(result, run),
        "steps": to_step_figures(run),
        "engine": asdict(result.info),
    }


def to_prefix_figures(run: BenchRun, num_prompt: int, max_saved: int) -> Figures:
    """Prompt tokens that were not computed again, of those that need not be."""
    saved = run.num_cached_tokens
    return {
        "saved_tokens": saved,
        "max_saved_tokens": max_saved,
        "share_of_max": saved / max_saved if max_saved else None,
        "share_of_prompt": saved / num_prompt,
    }


def to_occupancy_figures(run: BenchRun, info: EngineInfo) -> Figures:
    """How full the steps and the KV cache were."""
    used = [step.num_decode_tokens + step.num_prefill_tokens for step in run.steps]
    blocks = [step.num_blocks_used for step in run.steps]
    counters = run.counters
    waiting_budget = counters.budget_tokens_while_waiting
    samples = counters.kv_waste_samples
    return {
        "budget_mean": statistics.fmean(used) / info.max_num_batched_tokens,
        "budget_while_waiting": counters.scheduled_tokens_while_waiting / waiting_budget
        if waiting_budget
        else None,
        "kv_mean": statistics.fmean(blocks) / info.num_kv_blocks,
        "kv_peak": max(blocks) / info.num_kv_blocks,
        "kv_waste": counters.kv_waste_sum / samples if samples else None,
        "running_mean": statistics.fmean(step.num_running for step in run.steps),
        "running_peak": max(step.num_running for step in run.steps),
    }


def to_roofline_figures(result: BenchResult, run: BenchRun) -> Figures:
    """The floor that this machine's measured rates set, over the time that the run took."""
    info = result.info
    bits = StoredBits(info.linear_bits, info.head_bits, info.kv_bits)
    floor = estimate_run(result.config, result.rates, bits, run.steps)
    return {
        "fraction": floor.total_s / run.seconds,
        "floor_s": floor.total_s,
        "linear_s": floor.linear_s,
        "attention_s": floor.attention_s,
        "head_s": floor.head_s,
        "bandwidth_gb_per_s": result.rates.bytes_per_s / 1e9,
        "gflop_per_s": result.rates.flops_per_s / 1e9,
    }


def to_step_figures(run: BenchRun) -> Figures:
    """Where the time of the steps went. `outside`: texts of finished rows, and the loop around the steps."""
    in_steps = sum(step.total_s for step in run.steps)
    figures: Figures = {"count": len(run.steps)}
    for name in (*PARTS, "bookkeeping", "total"):
        seconds = np.array([getattr(step, f"{name}_s") for step in run.steps])
        figures[name] = {
            "total_s": float(seconds.sum()),
            "share": float(seconds.sum()) / in_steps,
            "median_ms": float(np.median(seconds)) * 1e3,
            "p95_ms": float(np.percentile(seconds, 95)) * 1e3,
        }
    figures["outside_s"] = max(0.0, run.seconds - in_steps)
    return figures


def to_bench_text(payload: Figures) -> str:
    """The table of `bench`."""
    engine = payload["engine"]
    rates, num_runs = payload["runs_output_tokens_per_s"], len(payload["runs_output_tokens_per_s"])
    spread = f", median of {num_runs} runs ({to_span_text(rates)})" if num_runs > 1 else ""
    speed = f"{to_number_text(payload['output_tokens_per_s'])} output tokens/s{spread}"
    total = f"{to_number_text(payload['total_tokens_per_s'])} tokens/s in and out"
    counts = f"{payload['prompt_tokens']:,} in, {payload['output_tokens']:,} out, every row exactly its own"
    lines = [
        ("rows", f"{payload['rows']:,} in {to_seconds_text(payload['seconds'])}"),
        ("speed", speed),
        ("", total),
        ("tokens", counts),
        ("saved", to_saved_text(payload["prefix"])),
        ("preemptions", f"{payload['preemptions']:,}"),
        *to_occupancy_lines(payload["occupancy"], engine),
        ("roofline", to_roofline_text(payload["roofline"])),
        *to_step_lines(payload["steps"]),
    ]
    kernels = "torch" if engine["cpu_kernels"] == "none" else engine["cpu_kernels"]
    head = f"{payload['model']}  {payload['dtype']} on {engine['device']}, {kernels} kernels"
    return to_fields_text(head, lines)


def to_span_text(values: Sequence[float]) -> str:
    """The least and the most of some figures."""
    return f"{to_number_text(min(values))} to {to_number_text(max(values))}"


def to_saved_text(prefix: Figures) -> str:
    """How many prompt tokens sharing saved, of how many it could."""
    text = f"{prefix['saved_tokens']:,} prompt tokens, {to_share_text(prefix['share_of_prompt'])}"
    if not prefix["max_saved_tokens"]:
        return f"{text}; no two rows share a beginning"
    return f"{text}; {to_share_text(prefix['share_of_max'])} of the {prefix['max_saved_tokens']:,} possible"


def to_occupancy_lines(occupancy: Figures, engine: Figures) -> list[tuple[str, str]]:
    """How full the step budget, the KV cache and the slots were."""
    waiting = occupancy["budget_while_waiting"]
    budget = (
        f"{to_share_text(occupancy['budget_mean'])} of {engine['max_num_batched_tokens']:,} tokens a step"
    )
    if waiting is not None:
        budget += f", {to_share_text(waiting)} while rows wait"
    cache = (
        f"{to_share_text(occupancy['kv_mean'])} of {engine['num_kv_blocks']:,} blocks,"
        f" {to_share_text(occupancy['kv_peak'])} at most, waste {to_share_text(occupancy['kv_waste'])}"
    )
    running = f"{to_number_text(occupancy['running_mean'])} rows, {occupancy['running_peak']:,} at most"
    return [("budget", budget), ("KV cache", cache), ("running", running)]


def to_roofline_text(roofline: Figures) -> str:
    """The time that the machine's own rates would need, and the share of ours."""
    parts = ", ".join(
        f"{to_seconds_text(roofline[f'{name}_s'])} {label}"
        for name, label in (("linear", "layers"), ("attention", "attention"), ("head", "head"))
    )
    return (
        f"{to_share_text(roofline['fraction'])}: at least {to_seconds_text(roofline['floor_s'])} ({parts})"
        f" at {to_number_text(roofline['bandwidth_gb_per_s'])} GB/s"
        f" and {to_number_text(roofline['gflop_per_s'])} GFLOP/s"
    )


def to_step_lines(steps: Figures) -> list[tuple[str, str]]:
    """A line a part of the step, under one line of heads."""
    heads = "".join(f"{name:>11}" for name in ("total", "share", "median ms", "p95 ms"))
    lines = [(f"{steps['count']:,} steps", heads)]
    for name in (*PARTS, "bookkeeping", "total"):
        part = steps[name]
        cells = (to_seconds_text(part["total_s"]), to_share_text(part["share"]))
        times = (f"{part['median_ms']:.3f}", f"{part['p95_ms']:.3f}")
        lines.append((name, "".join(f"{cell:>11}" for cell in cells + times)))
    return [*lines, ("outside", f"{to_seconds_text(steps['outside_s']):>11}")]
