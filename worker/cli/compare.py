"""The command `gristmill compare`: words into rows and two sides; everything is checked before any model is loaded."""

from __future__ import annotations

import shutil
import sys
from typing import Annotated, Any

import typer

from gristmill.worker.cli.options import AsJson, build_spec, take_fields
from gristmill.worker.show.console import EXIT_INTERRUPTED, UsageRefused, print_error, print_out, to_json

DEFAULT_MAX_TOKENS = 128

_SIDE = "Model folder or GGUF file, with settings after commas:"
A = Annotated[
    str,
    typer.Argument(
        metavar="A", help=f"{_SIDE} PATH,quantization=int4,kv_dtype=fp8,dtype=float32,cpu_kernels=none."
    ),
]
B = Annotated[
    str,
    typer.Argument(metavar="B", help="The other one, written the same; A's path again for other settings."),
]
RowsFile = Annotated[
    str, typer.Option("--rows", metavar="FILE", help="Rows: .jsonl, .ndjson, .gz, .zst, .parquet.")
]
MaxTokens = Annotated[
    int,
    typer.Option(
        metavar="N", help=f"Most output tokens a row; default {DEFAULT_MAX_TOKENS}.", show_default=False
    ),
]
Language = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="Column to group by; default: the prompt's language, detected."),
]
Choices = Annotated[
    str | None,
    typer.Option(
        metavar="a,b,c", help="The answers to look for, by whole words; default: an answer's first word."
    ),
]
Output = Annotated[
    str | None, typer.Option(metavar="DIR", help="Folder for pairs.parquet, report.html and summary.json.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace these files in DIR.")]


@take_fields("prompt", "messages", "system", "limit")
def compare(
    a: A,
    b: B,
    rows: RowsFile,
    fields: dict[str, Any],
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    language: Language = None,
    choices: Choices = None,
    output: Output = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> int:
    """Run the same rows through two models or settings, greedily, and compare the answers pair by pair."""
    from gristmill.engine.checkpoint.opening import load_checkpoint
    from gristmill.worker.tools.compare.answers import parse_choices
    from gristmill.worker.tools.compare.files import check_output, write_files
    from gristmill.worker.tools.compare.rows import load_compare_rows
    from gristmill.worker.tools.compare.sides import parse_side

    sides = (parse_side("A", a), parse_side("B", b))
    wanted = parse_choices(choices)
    order = {"input": [rows], "output": output or "-", "model": a, "max_tokens": max_tokens}
    spec = build_spec(fields | order)
    found = load_compare_rows(spec, language)
    folder = check_output(output, overwrite, found.sources) if output is not None else None
    for side in sides:
        load_checkpoint(side.path)

    from gristmill.worker.show.progress import build_display
    from gristmill.worker.tools.compare.figures import to_compare_payload
    from gristmill.worker.tools.compare.run import run_compare

    try:
        comparison = run_compare(sides, found, wanted, build_display(sys.stderr))
    except KeyboardInterrupt:
        print_error("interrupted; nothing was written, the same command starts again")
        return EXIT_INTERRUPTED
    payload = to_compare_payload(comparison, rows)
    if not payload["compared"]:
        raise UsageRefused(f"no row could run: {payload['first_error']}")
    print_payload(payload, as_json)
    if folder is not None:
        write_files(folder, comparison, payload, found.sources)
    return 0


def print_payload(payload: dict[str, Any], as_json: bool) -> None:
    """The tables as wide as the terminal, or JSON."""
    from gristmill.worker.tools.compare.report import to_compare_text

    if as_json:
        print_out(to_json(payload))
        return
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else None
    print_out(to_compare_text(payload, width, colors=is_terminal))
