"""Which tensors a ModelConfig needs, their shapes and their GGUF names; checks a checkpoint for them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gristmill.engine.checkpoint.architectures import LAYER_TENSORS, TOP_NAMES
from gristmill.engine.config import ModelConfig
from gristmill.engine.errors import ModelRefused

Shape = tuple[int, ...]

_GGUF_LAYER = {tensor.gguf: tensor.name for tensor in LAYER_TENSORS}
_GGUF_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)")


def hf_name(gguf_name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None: not a weight of the supported architectures."""
    match = _GGUF_NAME.fullmatch(gguf_name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    if layer is None:
        return f"{TOP_NAMES[part]}.{kind}" if part in TOP_NAMES else None
    name = _GGUF_LAYER.get(f"{part}.{kind}")
    return None if name is None else f"model.layers.{int(layer)}.{name}"


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that the model reads, by Hugging Face name; without lm_head when embeddings are tied."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    layer = _layer_shapes(config)
    for index in range(config.num_layers):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def check_tensors(config: ModelConfig, found: Mapping[str, Shape], path: str) -> None:
    """Raise ModelRefused for the first tensor that is missing, of another shape, or not known."""
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ModelRefused(
            f"{path}: {config.num_heads} heads of {config.head_dim} over {config.num_kv_heads} key heads"
            " can't be; the head count must be a multiple and the head size even"
        )
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise ModelRefused(
                f"{path}: tensor {name} is missing, which the {config.architecture} configuration needs;"
                " the checkpoint is incomplete or its configuration is of another model"
            )
        if found[name] != shape:
            raise ModelRefused(
                f"{path}: tensor {name} has shape {list(found[name])} but the configuration says"
                f" {list(shape)}; the configuration is of another model"
            )
    for name in found:
        if name not in expected and not _is_ignorable(name):
            raise ModelRefused(
                f"{path}: tensor {name} is not part of a {config.architecture} model as Gristmill knows it;"
                " the checkpoint is of another architecture or has more layers than its configuration says"
            )


def _is_ignorable(name: str) -> bool:
    """A tied copy of the embeddings, and buffers that old checkpoints stored."""
    return name == "lm_head.weight" or name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".masked_bias"))


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    sizes = {
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "query": config.num_heads * config.head_dim,
        "key": config.num_kv_heads * config.head_dim,
        "head": config.head_dim,
    }
    wanted = [each for each in LAYER_TENSORS if each.flag is None or getattr(config, each.flag)]
    return {each.name: tuple(sizes[size] for size in each.shape) for each in wanted}
