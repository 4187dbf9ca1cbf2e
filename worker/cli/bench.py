"""The command `gristmill bench`: words into rows, a model and engine options; everything is checked before any work.

The engine, and torch with it, is imported when the rows are about to run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gristmill.engine.config import EngineOptions, engine_flags
from gristmill.worker.cli.options import AsJson, take_engine_options
from gristmill.worker.show.console import EXIT_FAILED, UsageRefused, print_error, print_out, to_json

if TYPE_CHECKING:
    from gristmill.engine.config import ModelConfig
    from gristmill.engine.engine import Engine
    from gristmill.worker.tools.bench.workload import BenchRow

DEFAULT_ROWS = 128
DEFAULT_SHARED_PREFIX = 256
DEFAULT_PROMPT_TOKENS = "20-200"
DEFAULT_OUTPUT_TOKENS = "64"

File = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="JSONL rows {ids or prompt, max_tokens}; else made-up rows."),
]
Workload = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only the file's rows whose `wl` is NAME.")
]
Rows = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="How many rows; default 128, of a file all.")
]
SharedPrefix = Annotated[
    int | None, typer.Option(min=0, metavar="TOKENS", help="Tokens that all rows begin with; default 256.")
]
Levels = Annotated[
    str | None,
    typer.Option(metavar="T:F,...", help="A tree of prefixes, tokens:fan-out a level: 300:1,200:8."),
]
PromptTokens = Annotated[
    str | None, typer.Option(metavar="LOW-HIGH", help="A row's own prompt tokens; default 20-200.")
]
OutputTokens = Annotated[
    str | None,
    typer.Option(
        metavar="LOW-HIGH[:MEAN]", help="Tokens to generate, skewed to a mean if given; default 64."
    ),
]
Seed = Annotated[int, typer.Option(min=0, metavar="S", help="Seed of made-up rows and of the order.")]
Shuffle = Annotated[bool, typer.Option("--shuffle", help="Run the rows in a random order.")]
Model = Annotated[str | None, typer.Option(metavar="PATH", help="Hugging Face folder or GGUF file.")]
Shape = Annotated[
    str | None,
    typer.Option(metavar="NAME|k=v,...", help="Random weights: smollm2-135m, or hidden=576,layers=30,..."),
]
Repeat = Annotated[int, typer.Option(min=1, metavar="N", help="Passes over the rows; the median one counts.")]
Trace = Annotated[
    Path | None, typer.Option(metavar="PNG", help="Draw the steps over time (needs matplotlib).")
]


@take_engine_options(*engine_flags())
def bench(
    *,
    file: File = None,
    workload: Workload = None,
    rows: Rows = None,
    shared_prefix: SharedPrefix = None,
    levels: Levels = None,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = None,
    seed: Seed = 0,
    shuffle: Shuffle = False,
    model: Model = None,
    shape: Shape = None,
    engine_options: EngineOptions,
    repeat: Repeat = 1,
    as_json: AsJson = False,
    trace: Trace = None,
) -> int:
    """Measure the engine on this machine: speed, where the time went, what sharing saved."""
    if engine_options.num_kv_blocks is not None and engine_options.kv_cache_bytes is not None:
        raise UsageRefused("--kv-blocks and --kv-cache-mib exclude each other: give one of them")
    source = load_source(model, shape)
    made_up = {
        "--shared-prefix": shared_prefix, "--levels": levels,
        "--prompt-tokens": prompt_tokens, "--output-tokens": output_tokens,
    }  # fmt: skip
    check_trace(trace)
    found = load_rows(source, file, workload, rows, made_up, seed)
    engine_options = replace(engine_options, record_steps=True)
    return run_bench(source, order_rows(found, seed, shuffle), engine_options, repeat, as_json, trace)


@dataclass(frozen=True, slots=True)
class BenchSource:
    """What runs: a model's path, or None for random weights of the shape; name: for people."""

    model: str | None
    config: ModelConfig
    name: str


def load_source(model: str | None, shape: str | None) -> BenchSource:
    """The model or the shape of the flags; raises UsageRefused and ModelRefused."""
    from gristmill.engine.checkpoint.opening import load_checkpoint
    from gristmill.worker.tools.bench.shape import parse_shape

    if (model is None) == (shape is None):
        raise UsageRefused("give either --model PATH, or --shape for random weights")
    if model is not None:
        return BenchSource(model, load_checkpoint(model).config, model)
    assert shape is not None
    return BenchSource(None, parse_shape(shape), f"{shape}, random weights")


def check_trace(trace: Path | None) -> None:
    """Raises UsageRefused when a plot is wanted that can't be drawn."""
    from gristmill.worker.tools.bench.plot import check_trace_path

    if trace is not None:
        check_trace_path(trace)


def load_rows(
    source: BenchSource,
    file: Path | None,
    workload: str | None,
    num_rows: int | None,
    made_up: dict[str, Any],
    seed: int,
) -> list[BenchRow]:
    """The rows of the file or the made-up ones; made_up: the flags that describe these, by name."""
    from gristmill.engine.text.tokenizer import load_tokenizer
    from gristmill.worker.tools.bench import workload as bench_workload
    from gristmill.worker.tools.bench.workload import Level, SyntheticSpec, parse_lengths, parse_levels

    if file is not None:
        given = [flag for flag, value in made_up.items() if value is not None]
        if given:
            raise UsageRefused(f"{given[0]} describes made-up rows: leave it out, or FILE")

        def encode(texts: list[str]) -> list[Any]:
            assert source.model is not None
            tokenizer = load_tokenizer(source.model)
            return tokenizer.encode_batch([tokenizer.render_text(text) for text in texts])

        return bench_workload.load_workload(file, workload, num_rows, encode if source.model else None)
    if workload is not None:
        raise UsageRefused("--workload chooses rows of a file: give the FILE")
    prefix, tree = made_up["--shared-prefix"], made_up["--levels"]
    levels = parse_levels(tree) if tree is not None else ()
    if prefix is None:
        prefix = 0 if levels else DEFAULT_SHARED_PREFIX
    if prefix:
        levels = (Level(prefix, 1), *levels)
    spec = SyntheticSpec(
        num_rows=num_rows or DEFAULT_ROWS,
        levels=levels,
        prompt_tokens=parse_lengths("--prompt-tokens", made_up["--prompt-tokens"] or DEFAULT_PROMPT_TOKENS),
        output_tokens=parse_lengths("--output-tokens", made_up["--output-tokens"] or DEFAULT_OUTPUT_TOKENS),
        vocab_size=source.config.vocab_size,
        seed=seed,
    )
    return bench_workload.build_synthetic(spec)


def order_rows(rows: list[BenchRow], seed: int, shuffle: bool) -> list[BenchRow]:
    """The rows as they are, or shuffled."""
    from gristmill.worker.tools.bench.workload import shuffle_rows

    return shuffle_rows(rows, seed) if shuffle else rows


def check_fit(rows: Sequence[BenchRow], room: int, place: str) -> None:
    """Raises UsageRefused when a row is longer than `room` tokens with its output: it could not run to its end."""
    longest = max(len(row.token_ids) + row.max_tokens for row in rows)
    if longest > room:
        raise UsageRefused(
            f"the longest row has {longest:,} tokens with its output, {place} {room:,}: shorten the rows"
        )


def check_rows(rows: Sequence[BenchRow], source: BenchSource, engine_options: EngineOptions) -> None:
    """Raises UsageRefused for rows that the model could not run, as far as that is known before it is loaded."""
    from gristmill.engine.config import BLOCK_SIZE

    check_fit(rows, source.config.context_size, "the model's context holds")
    if engine_options.num_kv_blocks is not None:
        check_fit(rows, engine_options.num_kv_blocks * BLOCK_SIZE, "the KV cache holds")
    largest = max(max(row.token_ids) for row in rows)
    if largest >= source.config.vocab_size:
        raise UsageRefused(
            f"token id {largest} is beyond the model's vocabulary of {source.config.vocab_size}"
        )


def load_engine(source: BenchSource, engine_options: EngineOptions) -> Engine:
    """The engine of the model, or one with random weights; raises ModelRefused."""
    from gristmill.engine.build import build_engine, build_random_engine

    if source.model is not None:
        return build_engine(source.model, engine_options)
    return build_random_engine(source.config, engine_options, source.name)


def run_bench(
    source: BenchSource,
    rows: Sequence[BenchRow],
    engine_options: EngineOptions,
    repeat: int,
    as_json: bool,
    trace: Path | None,
) -> int:
    """Load the engine, run the rows, print the figures; the exit code."""
    check_rows(rows, source, engine_options)

    from gristmill.engine.batch.prefix import max_shared_tokens
    from gristmill.engine.measure.roofline import measure_rates
    from gristmill.worker.show.progress import build_display
    from gristmill.worker.tools.bench.plot import draw_trace
    from gristmill.worker.tools.bench.report import BenchResult, to_bench_payload, to_bench_text
    from gristmill.worker.tools.bench.run import find_miscount, run_passes

    engine = load_engine(source, engine_options)
    check_fit(rows, engine.info.max_request_tokens, "the engine holds")
    rates = measure_rates(engine.runner.model, engine.info.max_num_batched_tokens)
    runs = run_passes(engine, rows, repeat, build_display(sys.stderr))
    problems = [problem for problem in (find_miscount(rows, run) for run in runs) if problem is not None]
    if problems:
        print_error(f"wrong token counts: {problems[0]}")
        return EXIT_FAILED
    best = max_shared_tokens(row.token_ids for row in rows)
    result = BenchResult(source.config, engine.info, rates, rows, runs, best)
    payload = to_bench_payload(result)
    if trace is not None:
        speed = f"{payload['output_tokens_per_s']:,.0f} output tokens/s"
        draw_trace(trace, result.median.steps, engine.info, f"{source.name}: {len(rows):,} rows, {speed}")
    print_out(to_json(payload) if as_json else to_bench_text(payload))
    return 0
