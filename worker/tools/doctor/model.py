"""What doctor says of a model: whether it can run, and how many bytes each part of it takes once loaded.

Everything comes from headers; no tensor is read and torch is never imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from math import prod
from typing import Any

from gristmill.engine.checkpoint.fingerprint import fingerprint
from gristmill.engine.checkpoint.gguf_quants import CODE_SHAPES
from gristmill.engine.checkpoint.opening import Checkpoint, load_checkpoint, resolve_dtype
from gristmill.engine.checkpoint.tensor_sources import QuantizedSource, TensorSource
from gristmill.engine.checkpoint.weight_names import expected_shapes
from gristmill.engine.errors import EngineError
from gristmill.engine.null_engine import is_null_url, parse_null_url
from gristmill.worker.tools.doctor.check import Check, ModelSize, PartSize

PARTS = ("embedding", "attention", "mlp", "head", "norms")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_FILE_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def check_model(model: str) -> Check:
    """What the model is and whether it can be run, from its headers alone."""
    dtype = resolve_dtype("auto")
    try:
        if is_null_url(model):
            parse_null_url(model)
            return Check("model", "ok", f"{model}, no weights, fingerprint {fingerprint(model, dtype)}")
        checkpoint = load_checkpoint(model)
        mark = fingerprint(model, dtype)
    except EngineError as error:
        return Check(
            "model", "fail", str(error), "give a Hugging Face folder with safetensors, or a GGUF file"
        )
    config = checkpoint.config
    detail = (
        f"{config.architecture}, {checkpoint.format} {checkpoint.quantization}, {config.num_layers} layers, "
        f"context {config.context_size} tokens, dtype {dtype}, fingerprint {mark}"
    )
    return Check("model", "ok", detail, size=measure_model(checkpoint, dtype))


def measure_model(checkpoint: Checkpoint, dtype: str) -> ModelSize:
    """Bytes by part and type, the most first. dtype: float32 or bfloat16, of what is not kept in codes."""
    config = checkpoint.config
    sizes: dict[tuple[str, str, str], list[int]] = {}
    for name, shape in expected_shapes(config).items():
        file_type, loaded_as, num_bytes = _to_storage(checkpoint.tensors[name], dtype)
        total = sizes.setdefault((_to_part(name), file_type, loaded_as), [0, 0])
        total[0] += prod(shape)
        total[1] += num_bytes
    parts = [PartSize(*kind, num_weights, num_bytes) for kind, (num_weights, num_bytes) in sizes.items()]
    if config.tie_embeddings:  # the head's codes are the embedding's, floats are packed a second time
        embeddings = [part for part in parts if part.part == "embedding"]
        parts += [
            replace(each, part="head", is_shared=each.loaded_as not in DTYPE_BYTES) for each in embeddings
        ]
    kv_bytes = config.kv_bytes_per_token_f32 * DTYPE_BYTES[dtype] // 4
    parts.sort(key=lambda part: (PARTS.index(part.part), -part.num_bytes))
    return ModelSize(tuple(parts), dtype, kv_bytes)


def to_size_lines(size: ModelSize) -> Iterator[str]:
    """A line for each part and type, one for all weights, one for the KV cache."""
    for part in size.parts:
        kind = part.type if part.type == part.loaded_as else f"{part.type} as {part.loaded_as}"
        note = ", the embedding's bytes" if part.is_shared else ""
        yield _to_line(part.part, part.num_bytes, f"{part.bits_per_weight:.2f} bits a weight, {kind}{note}")
    yield _to_line("all weights", size.num_bytes, "")
    yield f"{'KV cache':<11}  {size.kv_bytes_per_token:>9,} bytes a token, {size.kv_dtype}"


def to_size_payload(size: ModelSize) -> dict[str, Any]:
    """The same as plain values, in bytes."""
    parts = [asdict(part) | {"bits_per_weight": part.bits_per_weight} for part in size.parts]
    return asdict(size) | {"parts": parts, "num_bytes": size.num_bytes}


def _to_line(name: str, num_bytes: int, rest: str) -> str:
    return f"{name:<11}  {num_bytes / (1 << 20):>9,.1f} MiB  {rest}".rstrip()


def _to_part(name: str) -> str:
    """Which part the tensor of this Hugging Face name belongs to."""
    if name.endswith("norm.weight"):
        return "norms"
    if ".self_attn." in name:
        return "attention"
    if ".mlp." in name:
        return "mlp"
    return "head" if name.startswith("lm_head.") else "embedding"


def _to_storage(source: TensorSource | QuantizedSource, dtype: str) -> tuple[str, str, int]:
    """How one tensor is kept: its type in the file, that in memory, and its bytes there."""
    if isinstance(source, QuantizedSource):
        return source.type, source.type, source.num_bytes
    num_weights = prod(source.shape)
    codes = CODE_SHAPES.get(source.type) if len(source.shape) == 2 else None
    name = _FILE_DTYPES.get(source.type, source.type.lower())
    if codes is None:
        return name, dtype, num_weights * DTYPE_BYTES[dtype]
    return name, codes.kind, round(codes.bits_per_weight * num_weights / 8)
