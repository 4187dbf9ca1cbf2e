"""What a --model path is, found from headers alone: format, configuration, and where each tensor lies.

Nothing is loaded and torch is not imported. What can't be run is refused here, in one line, before any work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gristmill.engine.checkpoint.architectures import ARCHITECTURES
from gristmill.engine.checkpoint.formats.quantization_config import load_plan
from gristmill.engine.checkpoint.gguf import GGUFFile, load_gguf
from gristmill.engine.checkpoint.gguf_config import gguf_model_config
from gristmill.engine.checkpoint.hf_config import hf_model_config
from gristmill.engine.checkpoint.safetensors_header import load_headers
from gristmill.engine.checkpoint.tensor_sources import QuantizedSource, TensorSource, gather_quantized
from gristmill.engine.checkpoint.weight_names import check_tensors, hf_name
from gristmill.engine.config import ModelConfig
from gristmill.engine.errors import ModelRefused
from gristmill.engine.model_files import find_model_kind, load_json_object
from gristmill.kernels.dispatch import default_dtype

_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_FLOAT_TYPES = tuple(_NAMES)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that can be loaded. `tensors` by Hugging Face name; quantization: how most bytes are stored."""

    path: str
    format: str  # gguf or safetensors
    config: ModelConfig
    quantization: str  # bfloat16, float16, float32, a GGUF type such as q4_1, or what the format calls itself
    tensors: Mapping[str, TensorSource | QuantizedSource] = field(repr=False)
    extras: Mapping[str, TensorSource] = field(default_factory=dict, repr=False)  # scales of an FP8 KV cache

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Hugging Face names of all tensors that the model has."""
        return tuple(self.tensors)

    @property
    def is_quantized(self) -> bool:
        """Whether some weights are stored in codes."""
        return any(source.type not in _FLOAT_TYPES for source in self.tensors.values())


def load_checkpoint(path: str) -> Checkpoint:
    """Read the headers of a model folder or a GGUF file; raises ModelRefused."""
    kind = find_model_kind(path)
    if kind == "null":
        raise ModelRefused(
            f"{path}: the null engine has no weights; use a Hugging Face folder or a .gguf file"
        )
    return _safetensors_checkpoint(Path(path)) if kind == "folder" else _gguf_checkpoint(load_gguf(path))


def check_quantization(checkpoint: Checkpoint, quantization: str) -> None:
    """Raises ModelRefused where weights that are in codes already would be quantized a second time."""
    if quantization not in ("auto", "none") and checkpoint.is_quantized:
        raise ModelRefused(
            f"{checkpoint.path} is quantized already ({checkpoint.quantization}): leave --quantization {quantization}"
            " away, or take the model's bfloat16 or float32 weights"
        )


def resolve_dtype(dtype: str) -> str:
    """bfloat16 or float32; auto: what the device multiplies fast. Raises ModelRefused."""
    if dtype in ("bfloat16", "float32"):
        return dtype
    if dtype != "auto":
        raise ModelRefused(f"dtype {dtype!r} is not known; use auto, bfloat16 or float32")
    return default_dtype()


def _gguf_checkpoint(file: GGUFFile) -> Checkpoint:
    config = gguf_model_config(file)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    interleaved = ARCHITECTURES[config.architecture].interleaves_rotary
    tensors: dict[str, TensorSource] = {}
    for tensor in file.tensors.values():
        if tensor.name == "rope_freqs.weight":  # became config.rope_scaling
            continue
        name = hf_name(tensor.name)
        if name is None:
            raise ModelRefused(
                f"{file.path}: tensor {tensor.name} is not known in a {config.architecture} model;"
                " the file is of an architecture that is not supported"
            )
        rotary = heads.get(name.split(".")[-2], 0) if interleaved else 0
        place = (file.path, tensor.offset, tensor.num_bytes)
        tensors[name] = TensorSource(*place, tensor.shape, tensor.type, rotary)
    return _checked(file.path, "gguf", config, tensors)


def _safetensors_checkpoint(folder: Path) -> Checkpoint:
    config = hf_model_config(folder)
    plan = load_plan(folder, load_json_object(folder / "config.json"))
    headers = load_headers(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ModelRefused(f"{folder}: no tokenizer.json; save the model's fast tokenizer into the folder")
    found = {
        name: TensorSource(entry.file, entry.offset, entry.num_bytes, entry.shape, entry.type)
        for name, entry in headers.items()
    }
    tensors: Mapping[str, TensorSource | QuantizedSource] = found
    extras: dict[str, TensorSource] = {}
    if plan is not None:
        extras = {name: found.pop(name) for name in list(found) if plan.is_extra(name)}
        tensors = gather_quantized(config, plan.scheme_of, found, str(folder))
    for name, source in tensors.items():
        if isinstance(source, TensorSource) and source.type not in _FLOAT_TYPES:
            raise ModelRefused(
                f"{folder}: tensor {name} is {source.type}, but config.json does not say how it is quantized;"
                f" use weights in {', '.join(_FLOAT_TYPES)}, or the config.json that belongs to them"
            )
    return replace(_checked(str(folder), "safetensors", config, tensors), extras=extras)


def _checked(
    path: str, kind: str, config: ModelConfig, tensors: Mapping[str, TensorSource | QuantizedSource]
) -> Checkpoint:
    check_tensors(config, {name: source.shape for name, source in tensors.items()}, path)
    sizes: Counter[str] = Counter()
    for source in tensors.values():
        sizes[source.type] += source.num_bytes
    common = sizes.most_common(1)[0][0]
    return Checkpoint(path, kind, config, _NAMES.get(common, common.lower()), tensors)
