"""What a --model path is, found from headers alone: format, configuration, and where each tensor lies.

Nothing is loaded and torch is not imported. What can't be run is refused here, in one line, before any work.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.config import ModelConfig
from engine.errors import ModelRefused
from engine.gguf import GGUFFile, load_gguf
from engine.gguf_config import gguf_model_config
from engine.hf_config import hf_model_config
from engine.model_path import find_model_kind
from engine.safetensors_header import load_headers
from engine.weight_names import check_tensors, hf_name

_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where the bytes of one tensor are. type: a name of gguf_quants.BLOCK_SHAPES.

    rotary_heads: over how many heads the rows are interleaved and must be put in order; 0: they are in order.
    """

    file: str
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    type: str
    rotary_heads: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that can be loaded. `tensors` by Hugging Face name; quantization: the type most bytes have."""

    path: str
    format: str  # gguf or safetensors
    config: ModelConfig
    quantization: str  # bfloat16, float16, float32, q8_0, q4_0 or q4_1
    tensors: Mapping[str, TensorSource] = field(repr=False)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Hugging Face names of all tensors in the files."""
        return tuple(self.tensors)


def load_checkpoint(path: str) -> Checkpoint:
    """Read the headers of a model folder or a GGUF file; raises ModelRefused."""
    kind = find_model_kind(path)
    if kind == "null":
        raise ModelRefused(
            f"{path}: the null engine has no weights; use a Hugging Face folder or a .gguf file"
        )
    return _safetensors_checkpoint(Path(path)) if kind == "folder" else _gguf_checkpoint(load_gguf(path))


def resolve_dtype(dtype: str) -> str:
    """bfloat16 or float32; auto: bfloat16 where the CPU has AVX512-BF16 or AMX to multiply it."""
    if dtype in ("bfloat16", "float32"):
        return dtype
    if dtype != "auto":
        raise ModelRefused(f"dtype {dtype!r} is not known; use auto, bfloat16 or float32")
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    return "bfloat16" if re.search(r"\b(avx512_bf16|amx_bf16)\b", flags) else "float32"


def _gguf_checkpoint(file: GGUFFile) -> Checkpoint:
    config = gguf_model_config(file)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    interleaved = config.architecture in ("llama", "mistral")
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
    headers = load_headers(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ModelRefused(f"{folder}: no tokenizer.json; save the model's fast tokenizer into the folder")
    tensors = {
        name: TensorSource(entry.file, entry.offset, entry.num_bytes, entry.shape, entry.type)
        for name, entry in headers.items()
    }
    return _checked(str(folder), "safetensors", config, tensors)


def _checked(path: str, kind: str, config: ModelConfig, tensors: dict[str, TensorSource]) -> Checkpoint:
    check_tensors(config, {name: source.shape for name, source in tensors.items()}, path)
    sizes: Counter[str] = Counter()
    for source in tensors.values():
        sizes[source.type] += source.num_bytes
    common = sizes.most_common(1)[0][0]
    return Checkpoint(path, kind, config, _NAMES.get(common, common.lower()), tensors)
