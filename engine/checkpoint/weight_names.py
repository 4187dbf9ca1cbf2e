"""Which tensors a ModelConfig needs, their shapes and their GGUF names; checks a checkpoint for them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gristmill.engine.config import ModelConfig
from gristmill.engine.errors import ModelRefused

Shape = tuple[int, ...]

_GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)")


def hf_name(gguf_name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None: not a weight of the supported architectures."""
    match = _GGUF_NAME.fullmatch(gguf_name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    if layer is None:
        return f"{_GGUF_TOP[part]}.{kind}" if part in _GGUF_TOP else None
    return f"model.layers.{int(layer)}.{_GGUF_LAYER[part]}.{kind}" if part in _GGUF_LAYER else None


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
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        shapes |= {
            f"self_attn.{part}_proj.bias": (size,) for part, size in (("q", query), ("k", key), ("v", key))
        }
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {f"self_attn.{part}_norm.weight": (config.head_dim,) for part in "qk"}
    if config.mlp_bias:
        shapes |= {
            "mlp.gate_proj.bias": (inner,),
            "mlp.up_proj.bias": (inner,),
            "mlp.down_proj.bias": (hidden,),
        }
    return shapes
