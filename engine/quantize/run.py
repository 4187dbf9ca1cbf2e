"""`gristmill quantize`: a folder of float weights into one of codes, layer by layer.

At any time one layer's weights are in memory, and with calibration the hidden states of its text and the layer's
Gram matrices. A finished layer is a file; the same order continues after the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gristmill.engine.checkpoint.fingerprint import fingerprint
from gristmill.engine.checkpoint.opening import Checkpoint, load_checkpoint
from gristmill.engine.checkpoint.tensor_sources import TensorSource
from gristmill.engine.checkpoint.weight_names import expected_shapes
from gristmill.engine.checkpoint.weights import load_part
from gristmill.engine.config import ModelConfig
from gristmill.engine.errors import ModelRefused
from gristmill.engine.model.decoder import embed
from gristmill.engine.model_files import load_json_object
from gristmill.engine.quantize.awq import quantize_awq
from gristmill.engine.quantize.calibration import CalibrationText, build_sequences, load_text
from gristmill.engine.quantize.gptq import quantize_gptq
from gristmill.engine.quantize.layer import INPUT_GROUPS, LINEARS, InputObserver, LayerRunner
from gristmill.engine.quantize.packing import from_stored, quantization_config, to_stored
from gristmill.engine.quantize.rtn import check_groups, default_group_size, linear_columns, quantize_rtn
from gristmill.engine.quantize.writer import OutputFolder, check_output, open_output
from gristmill.engine.text.tokenizer import load_tokenizer
from gristmill.kernels.quantized import Kind, QuantizedTensor

Method = Literal["rtn", "gptq", "awq"]
Progress = Callable[[int, int], None]  # layers done, of so many
_VERSION = 1  # of what the methods compute: another one's files are not continued


@dataclass(frozen=True, slots=True)
class QuantizeOrder:
    """What was asked for. group_size: columns of an int4 group, None: the default; calibrate None: built-in text."""

    model: str
    output: Path
    kind: Kind
    method: Method
    group_size: int | None
    calibrate: Path | None
    max_tokens: int


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """An order that can be carried out. group_size None: one scale a row; text None: the method needs none."""

    order: QuantizeOrder
    checkpoint: Checkpoint
    group_size: int | None
    group_reason: str  # a line for people
    text: CalibrationText | None
    sequences: tuple[tuple[int, ...], ...]
    scale_type: torch.dtype
    identity: dict[str, str | int | None]  # what decides the output's bytes


def plan_quantize(order: QuantizeOrder) -> QuantizePlan:
    """Checks everything that can be checked before any work; raises ModelRefused."""
    checkpoint = load_checkpoint(order.model)
    _check_source(checkpoint)
    group_size, reason = _choose_groups(order, checkpoint.config)
    text, sequences = None, []
    if order.method != "rtn":
        text = load_text(order.calibrate)
        tokenizer = load_tokenizer(order.model)
        sequences = build_sequences(text, tokenizer, checkpoint.config, order.max_tokens)
    identity: dict[str, str | int | None] = {
        "version": _VERSION,
        "source": fingerprint(order.model, "float32"),
        "to": order.kind,
        "group_size": group_size,
        "method": order.method,
        "calibration": None if text is None else text.digest,
        "calibrate_tokens": sum(map(len, sequences)),
    }
    check_output(order.output, identity)
    is_bfloat16 = checkpoint.quantization == "bfloat16"
    wide = torch.float16 if order.kind == "int4" or checkpoint.quantization == "float16" else torch.float32
    scale_type = torch.bfloat16 if is_bfloat16 else wide
    fixed = tuple(map(tuple, sequences))
    return QuantizePlan(order, checkpoint, group_size, reason, text, fixed, scale_type, identity)


def run_quantize(plan: QuantizePlan, on_progress: Progress) -> None:
    """Writes the output folder, from where an earlier run of the same order left it.

    Raises ModelRefused for weights that can't be, EngineError where the output can't be written.
    """
    config, path = plan.checkpoint.config, plan.order.output
    with torch.inference_mode(), open_output(path, plan.identity, config.num_layers + 1) as folder:
        if folder.is_complete:
            on_progress(config.num_layers, config.num_layers)
            return
        names = {0: _write_rest(plan, folder)}
        calibration = _Calibration(plan) if plan.sequences else None
        for index in range(config.num_layers):
            on_progress(index, config.num_layers)
            if folder.has(index + 1):
                stored = folder.read(index + 1)
                if calibration is not None:
                    calibration.advance(_restored(plan, stored, index))
            else:
                stored = _quantize_layer(plan, index, calibration)
                folder.write(index + 1, stored)
            names[index + 1] = sorted(stored)
        source = Path(plan.checkpoint.path)
        raw = load_json_object(source / "config.json")
        raw["quantization_config"] = quantization_config(plan.order.kind, plan.group_size)
        folder.finish(source, raw, names)
        on_progress(config.num_layers, config.num_layers)


class _Calibration:
    """The hidden states of the calibration text before the layer that is next."""

    def __init__(self, plan: QuantizePlan) -> None:
        ids = torch.tensor(plan.sequences)  # [num_sequences, num_tokens]
        table = _load(plan.checkpoint, "model.embed_tokens.weight")
        config = plan.checkpoint.config
        self.hidden = embed(config, table, ids.view(-1), torch.float32).view(*ids.shape, -1)
        self._runner = LayerRunner(config, ids.shape[1])

    def observe(self, weights: dict[str, Tensor]) -> InputObserver:
        """What the linear layers of these float weights see."""
        observer = InputObserver()
        self._runner.run(weights, self.hidden, observer)
        return observer

    def advance(self, weights: dict[str, Tensor]) -> None:
        """Goes on to the next layer, through this one's weights as they are written."""
        self.hidden = self._runner.run(weights, self.hidden)


def _quantize_layer(plan: QuantizePlan, index: int, calibration: _Calibration | None) -> dict[str, Tensor]:
    """The tensors of one layer as they are written; the calibration has gone on to the next layer."""
    order, base = plan.order, _base(index)
    stored = {
        name.removeprefix(base): _load(plan.checkpoint, name)
        for name in expected_shapes(plan.checkpoint.config)
        if name.startswith(base)
    }
    rest = {name: tensor for name, tensor in stored.items() if name.removesuffix(".weight") not in LINEARS}
    codes: dict[str, QuantizedTensor] = {}
    if calibration is None:
        for name in LINEARS:
            codes[name] = quantize_rtn(
                stored.pop(f"{name}.weight"), order.kind, plan.group_size, plan.scale_type
            )
    else:
        assert plan.group_size is not None, "methods that calibrate make int4"
        weights = {name: tensor.float() for name, tensor in stored.items()}
        observer = calibration.observe(weights)
        if order.method == "gptq":
            codes = _gptq_layer(plan, weights, observer)
        else:
            norm_type = rest["input_layernorm.weight"].dtype
            codes, changed = quantize_awq(
                plan.checkpoint.config, weights, observer, plan.group_size, norm_type, plan.scale_type
            )
            rest = {name: changed[name].to(tensor.dtype) for name, tensor in rest.items()}
    result = {base + name: tensor for name, tensor in rest.items()}
    for name, tensor in codes.items():
        result |= to_stored(base + name, tensor, plan.scale_type)
    if calibration is not None:
        calibration.advance(_restored(plan, result, index))
    return result


def _gptq_layer(
    plan: QuantizePlan, weights: dict[str, Tensor], observer: InputObserver
) -> dict[str, QuantizedTensor]:
    """Layers that read the same input are rounded as one matrix: the work on its columns is shared."""
    assert plan.group_size is not None
    codes: dict[str, QuantizedTensor] = {}
    for names in INPUT_GROUPS:
        parts = [weights.pop(f"{name}.weight") for name in names]
        gram, _ = observer.means(names[0])
        whole = quantize_gptq(torch.cat(parts), gram, plan.group_size, plan.scale_type)
        rows = torch.arange(whole.shape[0]).split([len(part) for part in parts])
        codes |= {name: whole.take_rows(part) for name, part in zip(names, rows, strict=True)}
    return codes


def _restored(plan: QuantizePlan, stored: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """The float weights that a layer's written tensors stand for, by name within the layer."""
    base = _base(index)
    weights = {}
    for full, tensor in stored.items():
        name = full.removeprefix(base)
        if name.rpartition(".")[0] not in LINEARS or name.endswith(".bias"):
            weights[name] = tensor.float()
    for name in LINEARS:
        weights[f"{name}.weight"] = from_stored(base + name, stored, plan.order.kind).dequantize()
    return weights


def _write_rest(plan: QuantizePlan, folder: OutputFolder) -> list[str]:
    """Writes the tensors outside of layers as they are. Returns their names."""
    names = [name for name in expected_shapes(plan.checkpoint.config) if not name.startswith("model.layers.")]
    if not folder.has(0):
        folder.write(0, {name: _load(plan.checkpoint, name) for name in names})
    return names


def _load(checkpoint: Checkpoint, name: str) -> Tensor:
    source = checkpoint.tensors[name]
    assert isinstance(source, TensorSource), "the source's weights are floats"
    tensor = load_part(source)
    if not torch.isfinite(tensor).all():
        raise ModelRefused(
            f"{checkpoint.path}: tensor {name} holds numbers that are not finite;"
            " the checkpoint is damaged, get it again"
        )
    return tensor


def _base(index: int) -> str:
    return f"model.layers.{index}."


def _check_source(checkpoint: Checkpoint) -> None:
    if checkpoint.format == "gguf":
        raise ModelRefused(
            f"{checkpoint.path}: a GGUF file; quantize takes the folder with the model's safetensors weights"
        )
    if checkpoint.is_quantized:
        raise ModelRefused(
            f"{checkpoint.path}: quantized already ({checkpoint.quantization}); take the model's float weights"
        )


def _choose_groups(order: QuantizeOrder, config: ModelConfig) -> tuple[int | None, str]:
    """(group size, why). Raises ModelRefused."""
    if order.kind != "int4":
        if order.group_size is not None:
            raise ModelRefused(
                f"--group-size {order.group_size}: {order.kind} has one scale a row; leave the option away"
            )
        if order.method != "rtn":
            raise ModelRefused(
                f"--method {order.method} makes int4; {order.kind} loses so little that it is rounded only"
            )
        return None, "one scale a row"
    try:
        if order.group_size is not None:
            check_groups(config, order.group_size)
            return order.group_size, f"group size {order.group_size}, as told"
        size = default_group_size(config)
    except ValueError as error:
        raise ModelRefused(f"{order.model}: {error}") from error
    columns = ", ".join(map(str, linear_columns(config)))
    return (
        size,
        f"group size {size}, the largest of 128, 64 and 32 that divides the linear layers' columns ({columns})",
    )
