"""ModelConfig from the config.json of a Hugging Face folder.

What is particular to an architecture, defaults and flags, is its row in architectures.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.engine.checkpoint.architectures import ARCHITECTURES, Architecture
from gristmill.engine.checkpoint.eos import hf_eos_token_ids
from gristmill.engine.checkpoint.formats.config_section import ConfigSection
from gristmill.engine.config import ModelConfig, RopeScaling, yarn_magnitude
from gristmill.engine.errors import ModelRefused
from gristmill.engine.model_files import load_json_object

_REMEDY = "download config.json again"


def hf_model_config(folder: Path) -> ModelConfig:
    """Read config.json; raises ModelRefused when it is missing or asks for what is not supported."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelRefused(
            f"{folder}: no config.json; --model takes a Hugging Face folder, a .gguf file or null:"
        )
    raw = load_json_object(path)
    architecture = _architecture(path, raw)
    keys = ConfigSection(str(path), "", {**architecture.defaults, **raw}, _REMEDY)
    _refuse_unsupported(path, raw)
    num_heads = keys.size("num_attention_heads")
    hidden_size = keys.size("hidden_size")
    context_size = keys.size("max_position_embeddings")
    scaling, rope_theta = _rope(path, raw, context_size)
    context_size = context_size if scaling is None else scaling.stretch(context_size)
    num_layers = keys.size("num_hidden_layers")
    window = _sliding_window(path, keys.values, architecture.sliding_window, num_layers)
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.size("num_key_value_heads", num_heads),
        head_dim=keys.size("head_dim", hidden_size // num_heads),
        context_size=context_size,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=scaling,
        tie_embeddings=bool(keys.values.get("tie_word_embeddings", False)),
        sliding_window=window if window is not None and window < context_size else None,
        eos_token_ids=hf_eos_token_ids(folder),
        **architecture.hf_flags(keys.values),
    )


def _architecture(path: Path, raw: dict[str, Any]) -> Architecture:
    names = raw.get("architectures") or []
    classes = {row.hf_class: row for row in ARCHITECTURES.values()}
    known = [classes[name] for name in names if name in classes] if isinstance(names, list) else []
    if known:
        return known[0]
    if not names and raw.get("model_type") in ARCHITECTURES:
        return ARCHITECTURES[raw["model_type"]]
    found = ", ".join(map(str, names)) if names else repr(raw.get("model_type"))
    raise ModelRefused(f"{path}: architecture {found} is not supported; use one of {', '.join(classes)}")


def _refuse_unsupported(path: Path, raw: dict[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelRefused(f"{path}: activation {activation!r} is not supported; use a model with silu")


def _sliding_window(path: Path, values: Mapping[str, Any], uses: str, num_layers: int) -> int | None:
    """The window of every layer, or None; a model that mixes full and windowed layers is refused."""
    window = values.get("sliding_window")
    if uses == "never" or not isinstance(window, int) or window < 1:
        return None
    if uses == "always":
        return int(window)
    if not values.get("use_sliding_window", False):
        return None
    first = int(values.get("max_window_layers", 28))
    kinds = values.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(num_layers)
    ]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) == {"sliding_attention"}:
        return int(window)
    raise ModelRefused(
        f"{path}: layers with and without a sliding window in one model are not supported;"
        " set use_sliding_window to false if the prompts fit the window"
    )


def _rope(path: Path, raw: dict[str, Any], context_size: int) -> tuple[RopeScaling | None, float]:
    """(scaling, theta): transformers 5 writes rope_parameters, before it rope_theta and rope_scaling."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ModelRefused(f"{path}: rope parameters are {type(parameters).__name__}, not an object")
    theta = ConfigSection(str(path), "", raw | parameters, _REMEDY).number("rope_theta", 10000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelRefused(f"{path}: rotary embedding over {partial} of a head is not supported")
    if kind == "default":
        return None, theta
    if kind not in ("linear", "llama3", "yarn") or not parameters.get("truncate", True):
        raise ModelRefused(
            f"{path}: rope scaling {kind!r} is not supported; use a model with linear, llama3 or yarn"
        )
    try:
        return _scaling(str(kind), parameters, context_size), theta
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelRefused(
            f"{path}: rope scaling {kind!r} is incomplete ({error!r}); download config.json again"
        ) from error


def _scaling(kind: str, parameters: dict[str, Any], context_size: int) -> RopeScaling:
    if kind == "linear":
        return RopeScaling(kind, float(parameters["factor"]))
    if kind == "llama3":
        return RopeScaling(
            kind,
            float(parameters["factor"]),
            int(parameters["original_max_position_embeddings"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
        )
    original = int(parameters.get("original_max_position_embeddings") or context_size)
    factor = float(parameters.get("factor") or context_size / original)
    return RopeScaling(
        kind,
        factor,
        original,
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(parameters, factor),
    )


def _yarn_attention_factor(parameters: dict[str, Any], factor: float) -> float:
    """What cosines and sines are multiplied by."""
    stated = parameters.get("attention_factor")
    if stated is not None:
        return float(stated)
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        over = yarn_magnitude(factor, float(parameters["mscale_all_dim"]))
        return yarn_magnitude(factor, float(parameters["mscale"])) / over
    return yarn_magnitude(factor)
