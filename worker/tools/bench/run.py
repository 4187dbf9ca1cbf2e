"""Runs the rows of a benchmark through an engine in this process, several times, and checks what came back.

Imported by the command only when it runs: the engine brings torch.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gristmill.engine.engine import Engine
from gristmill.engine.request import Completion, EngineCounters, Request, SamplingParams
from gristmill.engine.step_trace import StepRecord
from gristmill.worker.show.progress import Display, Progress
from gristmill.worker.tools.bench.workload import BenchRow

SHOW_INTERVAL_S = 0.5
WARM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One pass over all rows: the time from the first request to the last completion, and what was recorded."""

    seconds: float
    completions: dict[int, Completion]  # by row
    steps: tuple[StepRecord, ...]
    counters: EngineCounters

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        return sum(completion.num_cached_tokens for completion in self.completions.values())


def run_passes(engine: Engine, rows: Sequence[BenchRow], repeat: int, display: Display) -> list[BenchRun]:
    """Runs all rows `repeat` times, after a first short row that is not counted."""
    warm_up(engine, rows)
    runs = []
    for index in range(repeat):
        display.start(len(rows), 0, f"run {index + 1} of {repeat}")
        try:
            # A group of its own: a pass learns nothing of its rows' lengths from the one before.
            runs.append(run_pass(engine, rows, group=index + 1, show=display.update))
        finally:
            display.stop()
    return runs


def warm_up(engine: Engine, rows: Sequence[BenchRow]) -> None:
    """Generates a few tokens, so that the first pass finds code and memory in place."""
    prompt = rows[0].token_ids[-1:] * WARM_TOKENS
    max_tokens = max(1, min(WARM_TOKENS, engine.info.max_request_tokens - len(prompt)))
    engine.add([_to_request(0, BenchRow(prompt, max_tokens), group=0)])
    while engine.has_work():
        engine.step()


def run_pass(
    engine: Engine, rows: Sequence[BenchRow], group: int, show: Callable[[Progress], None]
) -> BenchRun:
    """Hands all rows over at once and steps until the last one has ended."""
    first_id = group * len(rows)
    requests = [_to_request(first_id + index, row, group) for index, row in enumerate(rows)]
    before, num_steps = engine.counters(), len(engine.step_records)
    completions: dict[int, Completion] = {}
    start = time.perf_counter()
    shown = start
    engine.add(requests)
    while engine.has_work():
        for completion in engine.step():
            completions[completion.request_id - first_id] = completion
        if time.perf_counter() - shown >= SHOW_INTERVAL_S:
            shown = time.perf_counter()
            show(_to_progress(len(rows), len(completions), engine.counters().minus(before)))
    seconds = time.perf_counter() - start
    counters = engine.counters().minus(before)
    show(_to_progress(len(rows), len(completions), counters))
    return BenchRun(seconds, completions, tuple(engine.step_records[num_steps:]), counters)


def find_miscount(rows: Sequence[BenchRow], run: BenchRun) -> str | None:
    """What is wrong with the tokens that came back; None when every row has exactly its own."""
    for index, row in enumerate(rows):
        completion = run.completions.get(index)
        if completion is None:
            return f"row {index + 1} has no completion"
        if completion.error_code is not None:
            return f"row {index + 1} failed: {completion.error_message}"
        got = (completion.num_prompt_tokens, completion.num_output_tokens, len(completion.token_ids))
        if got != (len(row.token_ids), row.max_tokens, row.max_tokens):
            return (
                f"row {index + 1} has {got[0]} prompt tokens and {got[1]} output tokens ({got[2]} ids),"
                f" not {len(row.token_ids)} and {row.max_tokens}"
            )
    sampled, wanted = sum(step.num_sampled for step in run.steps), sum(row.max_tokens for row in rows)
    return None if sampled == wanted else f"the steps sampled {sampled} tokens, the rows have {wanted}"


def pick_median(runs: Sequence[BenchRun]) -> BenchRun:
    """The run of median time; of an even number, the slower one of the middle two."""
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def _to_request(request_id: int, row: BenchRow, group: int) -> Request:
    sampling = SamplingParams(max_tokens=row.max_tokens, ignore_eos=True)
    return Request(request_id, array("I", row.token_ids), sampling, group=group)


def _to_progress(num_rows: int, num_done: int, counters: EngineCounters) -> Progress:
    return Progress(
        rows_done=num_done,
        rows_total=num_rows,
        prompt_tokens=counters.num_prompt_tokens,
        completion_tokens=counters.num_output_tokens,
        cached_tokens=counters.num_cached_tokens,
    )
