"""The description of a tokenizer, whatever file it came from: what tokenizer.json and its neighbours say.

Also reads it from a Hugging Face folder; gguf_tokenizer.py makes it from GGUF metadata.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.engine.checkpoint.eos import hf_eos_token_ids, token_text
from gristmill.engine.errors import ModelRefused
from gristmill.engine.model_files import load_json_object, load_optional_json_object

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """backend: the content of a tokenizer.json. add_bos None: its post-processor decides."""

    origin: str
    backend: dict[str, Any] = field(repr=False)
    chat_template: str | None
    special_tokens: dict[str, str]  # bos_token, eos_token, ... as a chat template sees them
    add_bos: bool | None
    eos_token_ids: tuple[int, ...]


def hf_tokenizer_spec(folder: Path) -> TokenizerSpec:
    """Read the tokenizer files of a folder; raises ModelRefused when there is no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelRefused(f"{folder}: no tokenizer.json; save the model's fast tokenizer into the folder")
    config = load_optional_json_object(folder / "tokenizer_config.json")
    stated = load_optional_json_object(folder / "special_tokens_map.json") | config
    texts = {name: token_text(stated.get(name)) for name in _SPECIAL_NAMES}
    add_bos = config.get("add_bos_token")
    backend = load_json_object(path)
    model = backend.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or "merges" not in model:
        kind = model.get("type") if isinstance(model, dict) else None
        raise ModelRefused(
            f"{path}: tokenizer {kind!r} is not supported, only BPE; use a model with a BPE tokenizer"
        )
    return TokenizerSpec(
        origin=str(folder),
        backend=_within_vocabulary(backend, folder),
        chat_template=_chat_template(folder, config),
        special_tokens={name: text for name, text in texts.items() if text is not None},
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        eos_token_ids=hf_eos_token_ids(folder),
    )


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json; of several templates, the one named default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_bytes().decode("utf-8", "replace")
    template = config.get("chat_template")
    if template is None:
        template = load_optional_json_object(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _within_vocabulary(backend: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Without the added tokens that the model has no embedding for, so no text can produce such an id."""
    size = load_optional_json_object(folder / "config.json").get("vocab_size")
    added = backend.get("added_tokens") or []
    if not isinstance(size, int) or all(item["id"] < size for item in added):
        return backend
    return backend | {"added_tokens": [item for item in added if item["id"] < size]}
