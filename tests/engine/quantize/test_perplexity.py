"""What rounding costs SmolLM2 on a text it was not calibrated with: GPTQ and AWQ must lose less than rounding does.

`pytest -m long -s tests/engine/quantize/test_perplexity.py` prints the perplexities. Calibration: docstrings of the
standard library; held out: the language reference that pydoc ships, and an Apache licence.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pydoc_data.topics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from gristmill.engine.checkpoint.opening import load_checkpoint
from gristmill.engine.checkpoint.weights import iterate_weights
from gristmill.engine.quantize.calibration import CalibrationText, build_sequences
from gristmill.engine.quantize.layer import LayerRunner
from gristmill.engine.quantize.run import Method, QuantizeOrder, plan_quantize, run_quantize
from gristmill.engine.text.tokenizer import load_tokenizer
from gristmill.kernels import reference
from gristmill.kernels.quantized import QuantizedTensor
from tests.benchmarks.prepare_model import prepare_model

GROUP_SIZE = 64
CALIBRATION_TOKENS = 8192
HELD_OUT_TOKENS = 4096
MODULES = (
    *("argparse", "ast", "asyncio.events", "bisect", "calendar", "collections", "configparser", "contextlib"),
    *("csv", "datetime", "decimal", "difflib", "email.message", "enum", "fractions", "functools", "heapq"),
    *(
        "http.client",
        "inspect",
        "ipaddress",
        "itertools",
        "json",
        "logging",
        "mailbox",
        "multiprocessing.pool",
    ),
    *("optparse", "os", "pathlib", "pickle", "random", "re", "shutil", "socket", "statistics", "string"),
    *("subprocess", "tarfile", "tempfile", "textwrap", "threading", "tkinter", "turtle", "unittest.case"),
    *("unittest.mock", "urllib.request", "uuid", "xml.dom.minidom", "zipfile"),
)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a folder of bfloat16 weights, which are those of the GGUF file."""
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    prepare_model(Path(smollm2_path).resolve(), folder)
    return folder


def _docstrings() -> str:
    """Docstrings of modules, classes and methods, each once, in a fixed order."""
    found: dict[str, None] = {}
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # tkinter is not in every Python
            continue
        members = [member for _, member in sorted(vars(module).items(), key=lambda item: item[0])]
        for owner in [module, *(member for member in members if inspect.isclass(member))]:
            found[inspect.getdoc(owner) or ""] = None
            for _, member in sorted(vars(owner).items(), key=lambda item: item[0]):
                if inspect.isroutine(member):
                    found[inspect.getdoc(member) or ""] = None
    return "\n\n".join(found)


def _held_out(folder: Path) -> list[list[int]]:
    """Half language reference, half of it from its middle on, and the licence of this repository."""
    checkpoint, tokenizer = load_checkpoint(str(folder)), load_tokenizer(str(folder))
    topics = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    licence = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")
    text = CalibrationText("held out", (licence[:6000], topics[len(topics) // 2 :][:60_000]), "")
    return build_sequences(text, tokenizer, checkpoint.config, HELD_OUT_TOKENS)


def perplexity(folder: Path, sequences: list[list[int]]) -> float:
    """Of every token but the first of each sequence, by the weights that the folder's codes stand for, in float32."""
    checkpoint = load_checkpoint(str(folder))
    config = replace(checkpoint.config, sliding_window=None)
    weights = {
        name: weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
        for name, weight in iterate_weights(checkpoint, torch.float32)
    }
    ids = torch.tensor(sequences)
    hidden = weights["model.embed_tokens.weight"][ids]
    runner = LayerRunner(config, ids.shape[1])
    for index in range(config.num_layers):
        base = f"model.layers.{index}."
        layer = {name.removeprefix(base): t for name, t in weights.items() if name.startswith(base)}
        hidden = runner.run(layer, hidden)
    hidden = reference.rms_norm(hidden, weights["model.norm.weight"], config.rms_norm_eps)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    losses = [
        functional.cross_entropy(states[:-1] @ head.T, row[1:], reduction="sum").item()
        for states, row in zip(hidden, ids, strict=True)
    ]
    return math.exp(sum(losses) / (ids.numel() - len(ids)))


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # modules of the standard library, imported for their words
def test_gptq_and_awq_lose_less_perplexity_than_rounding(smollm2: Path, tmp_path: Path) -> None:
    text = tmp_path / "docstrings.txt"
    text.write_text(_docstrings(), encoding="utf-8")
    held_out = _held_out(smollm2)
    with torch.inference_mode():
        before = perplexity(smollm2, held_out)
        print(f"\nheld out {sum(map(len, held_out)):,} tokens; float32 {before:.3f}")
        found = {}
        cases: dict[Method, Path | None] = {"rtn": None, "gptq": text, "awq": text}
        for method, calibrate in cases.items():
            output = tmp_path / method
            order = QuantizeOrder(
                str(smollm2), output, "int4", method, GROUP_SIZE, calibrate, CALIBRATION_TOKENS
            )
            run_quantize(plan_quantize(order), lambda done, total: None)
            found[method] = perplexity(output, held_out)
            print(f"{method}: {found[method]:.3f}, {found[method] / before - 1:+.2%}", flush=True)
    lost = {name: math.log(value / before) for name, value in found.items()}
    for name in ("gptq", "awq"):
        share = 1 - lost[name] / lost["rtn"]
        print(f"{name} gives back {share:.0%} of what rounding loses (in log perplexity)")
    assert lost["gptq"] < lost["rtn"] and lost["awq"] < lost["rtn"]
