"""The command `gristmill quantize`: words into an order; everything is checked before any work.

torch is imported when the command runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from gristmill.worker.show.console import UsageRefused, print_out

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Hugging Face folder with float safetensors weights.")
]
To = Annotated[Literal["int4", "fp8", "int8"], typer.Option("--to", help="What a weight becomes.")]
Output = Annotated[
    Path, typer.Option(metavar="DIR", help="Folder for the quantized model; the same command goes on there.")
]
GroupSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="int4: columns that share a scale; default the largest of 128, 64, 32 that fits.",
    ),
]
ChosenMethod = Annotated[
    Literal["rtn", "gptq", "awq"] | None,
    typer.Option("--method", help="How int4 is rounded; default rtn, with --calibrate gptq."),
]
Calibrate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="For gptq and awq: .jsonl with text, prompt or messages, or plain text; default built in.",
    ),
]
CalibrateTokens = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Most tokens to calibrate with; default 32768.")
]
Threads = Annotated[int | None, typer.Option(min=1, metavar="N", help="Default: all cores.")]


def quantize(
    model: Model,
    to: To,
    output: Output,
    group_size: GroupSize = None,
    method: ChosenMethod = None,
    calibrate: Calibrate = None,
    calibrate_tokens: CalibrateTokens = None,
    threads: Threads = None,
) -> int:
    """Write a model's weights in fewer bits, as a folder that this and other engines load."""
    chosen = method or ("rtn" if calibrate is None else "gptq")
    if chosen == "rtn" and (calibrate is not None or calibrate_tokens is not None):
        raise UsageRefused("--method rtn looks at no text: leave --calibrate away, or choose gptq or awq")

    import torch

    from gristmill.engine.quantize.calibration import DEFAULT_TOKENS
    from gristmill.engine.quantize.run import QuantizeOrder, plan_quantize, run_quantize
    from gristmill.worker.show.quantize_progress import LayerProgress

    if threads is not None:
        torch.set_num_threads(threads)
    tokens = DEFAULT_TOKENS if calibrate_tokens is None else calibrate_tokens
    plan = plan_quantize(QuantizeOrder(model, output, to, chosen, group_size, calibrate, tokens))
    print_out(f"{chosen} {to}, {plan.group_reason}")
    if plan.text is not None:
        print_out(f"calibrating with {sum(map(len, plan.sequences)):,} tokens of {plan.text.name}")
    with LayerProgress(sys.stderr) as progress:
        run_quantize(plan, progress.update)
    before, after = (_weight_bytes(path) for path in (Path(model), output))
    print_out(f"{output}: {after / 1e6:,.0f} MB of weights, before {before / 1e6:,.0f} MB")
    return 0


def _weight_bytes(folder: Path) -> int:
    from gristmill.engine.checkpoint.safetensors_header import weight_files

    return sum(file.stat().st_size for file in weight_files(folder))
