"""The BPE tokenizer in a GGUF file's metadata, as the same description that tokenizer.json holds.

GGUF names the pre-tokenizer (tokenizer.ggml.pre) but doesn't carry it; the rules behind the names stand here.
"""

from __future__ import annotations

from typing import Any

from gristmill.engine.checkpoint.eos import GGUF_CONTROL, GGUF_USER_DEFINED, gguf_eos_token_ids
from gristmill.engine.checkpoint.gguf import GGUFFile
from gristmill.engine.errors import ModelRefused
from gristmill.engine.text.tokenizer_spec import TokenizerSpec

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = {"type": "Digits", "individual_digits": True}

# tokenizer.ggml.pre -> the steps before byte-level BPE: a splitting pattern, or GPT-2's own after other steps
_PATTERNS = {"qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "tekken": _TEKKEN}
_PATTERNS |= dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3)
SPLIT_PATTERNS = frozenset(_PATTERNS.values())
_STEPS: dict[str, list[dict[str, Any]]] = {name: [] for name in ("default", "gpt-2", "gpt2")}
_STEPS |= {name: [_DIGITS] for name in ("smollm", "starcoder", "refact", "command-r")}
_IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a whole word in the vocabulary is one token
_NFC = ("qwen2", "deepseek-r1-qwen")


def gguf_tokenizer_spec(file: GGUFFile) -> TokenizerSpec:
    """Read the tokenizer; raises ModelRefused when it is not BPE or its pre-tokenizer is not known."""
    metadata = file.metadata
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ModelRefused(
            f"{file.path}: tokenizer {kind!r} is not supported, only BPE (gpt2);"
            " use the Hugging Face folder of this model with its tokenizer.json"
        )
    if pre not in _PATTERNS and pre not in _STEPS:
        raise ModelRefused(
            f"{file.path}: pre-tokenizer {pre!r} is not known; use one of {', '.join([*_STEPS, *_PATTERNS])},"
            " or the Hugging Face folder of this model"
        )
    tokens: Any = metadata.get("tokenizer.ggml.tokens")
    merges: Any = metadata.get("tokenizer.ggml.merges")
    if not _is_text_list(tokens) or not _is_text_list(merges):
        raise ModelRefused(
            f"{file.path}: the BPE vocabulary or its merges are missing; convert the model again"
        )
    special_tokens = {
        f"{name}_token": tokens[i]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if isinstance(i := metadata.get(f"tokenizer.ggml.{key}_token_id"), int) and 0 <= i < len(tokens)
    }
    template = metadata.get("tokenizer.chat_template")
    return TokenizerSpec(
        origin=file.path,
        backend=_backend(tokens, metadata.get("tokenizer.ggml.token_type", []), merges, pre),
        chat_template=template if isinstance(template, str) else None,
        special_tokens=special_tokens,
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", pre in _IGNORE_MERGES)),
        eos_token_ids=gguf_eos_token_ids(file),
    )


def _backend(tokens: list[str], types: list[int], merges: list[str], pre: str) -> dict[str, Any]:
    """The tokenizer.json that stands for this vocabulary."""
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre in _STEPS}
    split = {
        "type": "Split",
        "pattern": {"Regex": _PATTERNS.get(pre, "")},
        "behavior": "Isolated",
        "invert": False,
    }
    steps = _STEPS[pre] if pre in _STEPS else [split]
    added = [
        {
            "id": i, "content": token, "special": kind == GGUF_CONTROL,
            "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (GGUF_CONTROL, GGUF_USER_DEFINED)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre in _NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, whole]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
            "ignore_merges": pre in _IGNORE_MERGES,
        },
    }


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], str)
