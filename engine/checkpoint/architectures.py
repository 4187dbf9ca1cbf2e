"""The architectures that the decoder runs, a row each, and the tensors of a layer as both kinds of files name them.

A new architecture is a row of ARCHITECTURES. One that needs a new flag also has a field in ModelConfig, what the
decoder does with it, and, where the flag brings tensors, rows of LAYER_TENSORS.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Architecture:
    """What is particular to one. name: model_type in config.json and general.architecture in GGUF."""

    name: str
    hf_class: str  # in config.json's `architectures`
    # What config.json leaves out: the values of the configuration class in transformers.
    defaults: Mapping[str, Any]
    # Flags of ModelConfig: True, or the key of config.json that has the value; and the key of a GGUF file's metadata,
    # where a flag brings no tensors to be seen from.
    flags: Mapping[str, str | bool] = field(default_factory=dict)
    gguf_keys: Mapping[str, str] = field(default_factory=dict)
    # A sliding window on all layers, or on those that use_sliding_window and layer_types say.
    sliding_window: Literal["never", "always", "stated"] = "never"
    interleaves_rotary: bool = False  # GGUF files hold the rows of q and k pair by pair

    @property
    def fixed_flags(self) -> dict[str, Any]:
        """The flags that every model of the architecture has."""
        return {name: True for name, source in self.flags.items() if source is True}

    def hf_flags(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The flags that config.json's values say."""
        stated = {name: key for name, key in self.flags.items() if isinstance(key, str)}
        return self.fixed_flags | _present(values, stated)

    def gguf_flags(self, metadata: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        """The flags of a GGUF file: those that bring tensors are seen from the first layer's."""
        present = _present(metadata, {name: f"{self.name}.{key}" for name, key in self.gguf_keys.items()})
        for tensor in LAYER_TENSORS:
            if tensor.flag is not None:
                present[tensor.flag] = present.get(tensor.flag, False) or f"blk.0.{tensor.gguf}" in tensors
        return self.fixed_flags | present


def _present(values: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """What the values say of each flag; a flag whose key is absent or null keeps the default of ModelConfig."""
    return {flag: values[key] for flag, key in keys.items() if values.get(key) is not None}


_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}
_ROWS = (
    Architecture(
        "llama",
        "LlamaForCausalLM",
        {"max_position_embeddings": 2048},
        {"qkv_bias": "attention_bias", "output_bias": "attention_bias", "mlp_bias": "mlp_bias"},
        interleaves_rotary=True,
    ),
    Architecture(
        "mistral",
        "MistralForCausalLM",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        sliding_window="always",
        interleaves_rotary=True,
    ),
    Architecture("qwen2", "Qwen2ForCausalLM", _QWEN, {"qkv_bias": True}, sliding_window="stated"),
    Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        _QWEN | {"head_dim": 128},
        {"qkv_bias": "attention_bias", "output_bias": "attention_bias", "qk_norm": True},
        sliding_window="stated",
    ),
)
ARCHITECTURES = {row.name: row for row in _ROWS}


class LayerTensor(NamedTuple):
    """A tensor of every layer. shape: names of sizes, see weight_names; flag: of ModelConfig, that brings it."""

    name: str
    gguf: str
    shape: tuple[str, ...]
    flag: str | None = None


TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSORS = (
    LayerTensor("input_layernorm.weight", "attn_norm.weight", ("hidden",)),
    LayerTensor("post_attention_layernorm.weight", "ffn_norm.weight", ("hidden",)),
    LayerTensor("self_attn.q_proj.weight", "attn_q.weight", ("query", "hidden")),
    LayerTensor("self_attn.k_proj.weight", "attn_k.weight", ("key", "hidden")),
    LayerTensor("self_attn.v_proj.weight", "attn_v.weight", ("key", "hidden")),
    LayerTensor("self_attn.o_proj.weight", "attn_output.weight", ("hidden", "query")),
    LayerTensor("mlp.gate_proj.weight", "ffn_gate.weight", ("inner", "hidden")),
    LayerTensor("mlp.up_proj.weight", "ffn_up.weight", ("inner", "hidden")),
    LayerTensor("mlp.down_proj.weight", "ffn_down.weight", ("hidden", "inner")),
    LayerTensor("self_attn.q_proj.bias", "attn_q.bias", ("query",), "qkv_bias"),
    LayerTensor("self_attn.k_proj.bias", "attn_k.bias", ("key",), "qkv_bias"),
    LayerTensor("self_attn.v_proj.bias", "attn_v.bias", ("key",), "qkv_bias"),
    LayerTensor("self_attn.o_proj.bias", "attn_output.bias", ("hidden",), "output_bias"),
    LayerTensor("self_attn.q_norm.weight", "attn_q_norm.weight", ("head",), "qk_norm"),
    LayerTensor("self_attn.k_norm.weight", "attn_k_norm.weight", ("head",), "qk_norm"),
    LayerTensor("mlp.gate_proj.bias", "ffn_gate.bias", ("inner",), "mlp_bias"),
    LayerTensor("mlp.up_proj.bias", "ffn_up.bias", ("inner",), "mlp_bias"),
    LayerTensor("mlp.down_proj.bias", "ffn_down.bias", ("hidden",), "mlp_bias"),
)
