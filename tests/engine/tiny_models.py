"""Tiny random models of every architecture, as Hugging Face folders and GGUF files, for tests only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CONFIG_CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim"
    " + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
LLAMA2_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}{% else %}"
    "{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
CORPUS = [
    "My order 12345 has not arrived yet. Please tell me where it is; I paid on 3 May.",
    "Đơn hàng của tôi bị trễ ba ngày rồi. Xin hãy cho tôi biết khi nào hàng đến.",
    "The app crashes when I open the settings page 😀 and I can't log in any more!",
    "Classify this ticket: billing, delivery, account or other. Answer with one word.",
]


def build_tiny_model(folder: Path, architecture: str, max_shard_size: str = "1GB", **overrides: Any) -> Path:
    """Write a random model of `architecture` with its tokenizer; overrides go to its config."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_byte_level_tokenizer(folder)
    settings: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    if architecture == "mistral":
        settings["sliding_window"] = None
    config = CONFIG_CLASSES[architecture](**(settings | overrides))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide mistakes
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def build_byte_level_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer with ChatML tokens: tokenizer.json and tokenizer_config.json."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    _save(
        folder,
        tokenizer,
        {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE},
    )
    return tokenizer


def build_metaspace_tokenizer(folder: Path, chat_template: str | None = None) -> tokenizers.Tokenizer:
    """A tokenizer as Llama 2 has it: U+2581 for spaces, bytes as <0xF0>, BOS by the post-processor."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    english = [text for text in CORPUS if text.isascii()]
    tokenizer.train_from_iterator(english, trainer)
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = description["added_tokens"][
        :3
    ]  # byte tokens are part of the vocabulary only
    description["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    description["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(description))
    config: dict[str, Any] = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "unk_token": "<unk>",
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    _save(folder, tokenizer, config)
    return tokenizer


def build_tiny_gguf(
    folder: Path,
    path: Path,
    weight_type: str = "F32",
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    **metadata: Any,
) -> Path:
    """Convert a folder of build_tiny_model to GGUF as llama.cpp does. metadata: more keys; None drops one."""
    config = json.loads((folder / "config.json").read_text())
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", architecture))
    values = _gguf_values(config, architecture) | _gguf_tokenizer_values(folder) | metadata
    for key, value in values.items():
        if value is not None:
            _add_value(writer, key, value)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, architecture.upper()), config["num_hidden_layers"]
    )
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        data: np.ndarray = tensor.numpy()
        if architecture == "llama" and ".q_proj" in hf_name:
            data = _interleave(data, config["num_attention_heads"])
        if architecture == "llama" and ".k_proj" in hf_name:
            data = _interleave(data, config["num_key_value_heads"])
        kind = gguf.GGMLQuantizationType["F32" if data.ndim == 1 else weight_type]
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        raw = gguf.quantize(np.ascontiguousarray(data, np.float32), kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
    for name, data in (extra_tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleave(data: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order that llama.cpp's rotary embedding wants."""
    split = data.reshape(num_heads, 2, data.shape[0] // num_heads // 2, *data.shape[1:])
    return split.swapaxes(1, 2).reshape(data.shape)


def _gguf_values(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    values = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _gguf_tokenizer_values(folder: Path) -> dict[str, Any]:
    description = json.loads((folder / "tokenizer.json").read_text())
    vocab = description["model"]["vocab"]
    special = {item["content"] for item in description["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in description["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _save(folder: Path, tokenizer: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(base | config))
