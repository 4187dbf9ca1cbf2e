"""The tokens that end a text, gathered from every place where a model's files name one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gristmill.engine.checkpoint.gguf import GGUFFile
from gristmill.engine.model_files import load_optional_json_object

# Tokens that end a turn of a chat, whatever the files call the end of text.
END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
# GGUF names one end of text where generation_config.json lists several.
END_OF_TEXT_TOKENS = ("<|end_of_text|>", "<|endoftext|>")
GGUF_CONTROL, GGUF_USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def hf_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids of generation_config.json, config.json, tokenizer_config.json in this order, then ends of turns."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = load_optional_json_object(folder / name).get("eos_token_id")
        ids += [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and i >= 0]
    added = load_optional_json_object(folder / "tokenizer.json").get("added_tokens") or []
    special = {item["content"]: int(item["id"]) for item in added if item.get("special")}
    token = token_text(load_optional_json_object(folder / "tokenizer_config.json").get("eos_token"))
    ids += [special[text] for text in (token, *END_OF_TURN_TOKENS) if text in special]
    return tuple(dict.fromkeys(ids))


def gguf_eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """The declared ends of text and of turns first, then control tokens that by their name are one."""
    declared = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = [i for i in declared if isinstance(i, int)]
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    types = file.metadata.get("tokenizer.ggml.token_type", [])
    added = (GGUF_CONTROL, GGUF_USER_DEFINED)
    special = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind in added}
    ids += [special[token] for token in (*END_OF_TURN_TOKENS, *END_OF_TEXT_TOKENS) if token in special]
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < len(tokens)))


def token_text(value: Any) -> str | None:
    """The text of a token in tokenizer_config.json: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
