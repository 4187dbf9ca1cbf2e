"""Draws the steps of a benchmark over time as a PNG: a valley in it is throughput that was left lying.

matplotlib is an optional extra and is imported only when a plot is drawn; it opens no window.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.engine.request import EngineInfo
from gristmill.engine.step_trace import StepRecord
from gristmill.worker.show.console import UsageRefused

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE_INCHES = (13.0, 9.0)
DOTS_PER_INCH = 110
DECODE, PREFILL, LIMIT, BLOCKS, WAITING, PREEMPTED = (
    *("#2a6f97", "#f4a259", "#444444", "#76a571", "#8d6a9f", "#c1121f"),
)


def check_trace_path(path: Path) -> None:
    """Raises UsageRefused, before any work, when the plot could not be drawn there."""
    if find_spec("matplotlib") is None:
        raise UsageRefused("--trace needs matplotlib: pip install matplotlib")
    if path.suffix.lower() != ".png":
        raise UsageRefused(f"--trace {path}: the plot is a PNG; give a name that ends in .png")
    if path.is_dir() or not path.parent.is_dir():
        raise UsageRefused(f"--trace {path}: {path.parent} is not a folder; make it, or give another")


def draw_trace(path: Path, steps: Sequence[StepRecord], info: EngineInfo, title: str) -> None:
    """Writes the plot of one run's steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=FIGURE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    budget, cache, rows, times = figure.subplots(4, 1, sharex=True)
    trace = _Trace(steps)
    _draw_budget(budget, trace, info)
    _draw_cache(cache, trace, info)
    _draw_rows(rows, trace)
    _draw_times(times, trace)
    times.set_xlabel("seconds")
    for axes in (budget, cache, rows, times):
        axes.margins(x=0)
        axes.grid(alpha=0.25)
        axes.legend(loc="upper left", bbox_to_anchor=(1.04, 1.0), frameon=False)
    figure.suptitle(title)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UsageRefused(f"--trace {path}: {error.strerror}: give a place that can be written") from error


class _Trace:
    """The steps as columns; the last one is repeated at its end, so that it is as wide as it was long."""

    def __init__(self, steps: Sequence[StepRecord]) -> None:
        starts = [step.start_s - steps[0].start_s for step in steps]
        self.seconds = np.array([*starts, starts[-1] + steps[-1].total_s])
        self._steps = steps

    def column(self, name: str) -> Any:
        values = [getattr(step, name) for step in self._steps]
        return np.array([*values, values[-1]])


def _draw_budget(axes: Axes, trace: _Trace, info: EngineInfo) -> None:
    decode, prefill = trace.column("num_decode_tokens"), trace.column("num_prefill_tokens")
    axes.fill_between(trace.seconds, decode, step="post", color=DECODE, lw=0, label="decode")
    axes.fill_between(
        trace.seconds, decode, decode + prefill, step="post", color=PREFILL, lw=0, label="prefill"
    )
    axes.axhline(info.max_num_batched_tokens, color=LIMIT, lw=1, ls="--", label="budget")
    axes.set_ylim(0, info.max_num_batched_tokens * 1.08)
    axes.set_ylabel("tokens a step")


def _draw_cache(axes: Axes, trace: _Trace, info: EngineInfo) -> None:
    used = trace.column("num_blocks_used")
    axes.fill_between(trace.seconds, used, step="post", color=BLOCKS, lw=0, label="used")
    axes.axhline(info.num_kv_blocks, color=LIMIT, lw=1, ls="--", label="all")
    preempted = trace.column("num_preempted")
    preempted[-1] = 0  # the repeated step
    at = np.flatnonzero(preempted)
    if len(at):
        label = f"preemptions: {preempted.sum():,}"
        axes.plot(trace.seconds[at], used[at], "v", color=PREEMPTED, ms=6, label=label)
    axes.set_ylim(0, info.num_kv_blocks * 1.08)
    axes.set_ylabel("KV blocks")


def _draw_rows(axes: Axes, trace: _Trace) -> None:
    """Running rows on the left scale; those that wait may be thousands, on the right one."""
    right = axes.twinx()
    (waiting,) = right.step(
        trace.seconds, trace.column("num_waiting"), where="post", color=WAITING, label="waiting (right)"
    )
    axes.step(trace.seconds, trace.column("num_running"), where="post", color=DECODE, label="running")
    axes.plot([], [], color=waiting.get_color(), label=waiting.get_label())
    axes.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    axes.set_ylabel("rows")


def _draw_times(axes: Axes, trace: _Trace) -> None:
    total, forward = trace.column("total_s") * 1e3, trace.column("forward_s") * 1e3
    sample, bookkeeping = trace.column("sample_s") * 1e3, trace.column("bookkeeping_s") * 1e3
    parts = (forward, sample, bookkeeping)
    labels = ("forward", "head, sampling", "bookkeeping")
    low = np.zeros_like(total)
    for part, label, color in zip(parts, labels, (DECODE, PREFILL, PREEMPTED), strict=True):
        axes.fill_between(trace.seconds, low, low + part, step="post", color=color, lw=0, label=label)
        low = low + part
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ms a step")
