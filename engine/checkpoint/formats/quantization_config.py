"""How a Hugging Face folder's weights are quantized, from its configuration alone: method, and a scheme a module.

The configuration is config.json's `quantization_config` or `compression_config`, or ModelOpt's hf_quant_config.json.
What is not understood is refused by its key, before any weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.engine.checkpoint.formats.awq import load_awq_scheme
from gristmill.engine.checkpoint.formats.compressed_config import load_compressed_rules
from gristmill.engine.checkpoint.formats.config_section import ConfigSection
from gristmill.engine.checkpoint.formats.fp8 import load_fp8_rules, load_modelopt_rules
from gristmill.engine.checkpoint.formats.gptq import load_gptq_scheme
from gristmill.engine.checkpoint.formats.rules import (
    EVERY_MODULE,
    HEAD,
    Rule,
    compile_pattern,
    find_scheme,
    part_pattern,
)
from gristmill.engine.checkpoint.formats.scheme import Scheme
from gristmill.engine.errors import ModelRefused
from gristmill.engine.model_files import load_optional_json_object

_LINEAR = re.compile(r"model\.layers\.\d+\.(?:self_attn|mlp)\.\w+_proj|lm_head")
# Scales of the KV cache, where the tools of each method write them; and AutoFP8's one scale for both.
_KV_SCALE = re.compile(
    r"model\.layers\.\d+\.self_attn\."
    r"(?:(?:[qkv]_proj\.)?(?:q|k|v|kv|prob)_scale|[kv]_proj\.output_scale|[kv]_zero_point)"
)
_MODELOPT_FILE = "hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """Which modules are stored quantized, and how. kv_cache_dtype: fp8 where the configuration asks for it."""

    method: str
    rules: tuple[Rule, ...]
    kv_cache_dtype: str | None = None

    @property
    def label(self) -> str:
        """What a person calls it: the labels of the schemes, `awq int4 g128`."""
        labels = dict.fromkeys(rule.scheme.label for rule in self.rules if rule.scheme is not None)
        return " + ".join(labels) or f"{self.method} without quantized weights"

    def scheme_of(self, module: str) -> Scheme | None:
        """How a module such as model.layers.0.self_attn.q_proj is stored; None: it has an ordinary weight.

        Norms and embeddings always have.
        """
        return find_scheme(self.rules, module) if _LINEAR.fullmatch(module) else None

    def is_extra(self, tensor_name: str) -> bool:
        """Whether a tensor is known to come with this method though no module needs it: scales of the KV cache."""
        return _KV_SCALE.fullmatch(tensor_name) is not None


def load_plan(folder: Path, raw_config: dict[str, Any]) -> QuantizationPlan | None:
    """The plan of a folder; None where its weights are not quantized. raw_config: its config.json.

    Raises ModelRefused for a method or an option that is not supported.
    """
    section = _find_section(folder, raw_config)
    if section is None:
        return None
    method = str(section.one_of("quant_method", tuple(_LOADERS)))
    return QuantizationPlan(method, _LOADERS[method](section), _kv_cache_dtype(section))


def _find_section(folder: Path, raw_config: Mapping[str, Any]) -> ConfigSection | None:
    file = str(folder / "config.json")
    for key in ("quantization_config", "compression_config"):
        if raw_config.get(key):
            section = _with_method(_section(file, key, raw_config))
            for nested in ("quantization_config", "quantization"):  # older transformers; ModelOpt
                if section.values.get(nested):
                    inner = section.within(nested).values
                    section = ConfigSection(file, key, {**section.values, nested: None, **inner})
            return section
    values = load_optional_json_object(folder / _MODELOPT_FILE)
    if not values:
        return None
    inner = _section(str(folder / _MODELOPT_FILE), "quantization", values).values
    return ConfigSection(str(folder / _MODELOPT_FILE), "quantization", {"quant_method": "modelopt", **inner})


def _section(file: str, key: str, values: Mapping[str, Any]) -> ConfigSection:
    if not isinstance(values.get(key), dict):
        raise ModelRefused(f"{file}: {key} is {values.get(key)!r}, not an object; download the file again")
    return ConfigSection(file, key, values[key])


def _with_method(section: ConfigSection) -> ConfigSection:
    """Bitsandbytes is known by its flags where it isn't named."""
    values = section.values
    is_named = values.get("quant_method") is not None
    if is_named or not (values.get("load_in_4bit") or values.get("load_in_8bit")):
        return section
    return ConfigSection(section.file, section.name, {**values, "quant_method": "bitsandbytes"})


def _awq_rules(section: ConfigSection) -> tuple[Rule, ...]:
    """AutoAWQ quantizes the decoder's linears only; a skip list holds parts of names."""
    skipped = [Rule(part_pattern(part)) for part in section.strings("modules_to_not_convert") or ()]
    return (Rule(HEAD), *skipped, Rule(EVERY_MODULE, load_awq_scheme(section.file, dict(section.values))))


def _gptq_rules(section: ConfigSection) -> tuple[Rule, ...]:
    """The decoder's linears, and the head with `lm_head`.

    The first entry of `dynamic` that matches a module changes its settings, or skips it where it begins with -:.
    """
    section.one_of("block_name_to_quantize", (None, "model.layers"))
    values = {key: value for key, value in section.values.items() if key != "dynamic"}
    scheme = load_gptq_scheme(section.file, values)
    rules = [] if values.get("lm_head") else [Rule(HEAD)]
    exceptions = section.within("dynamic") if section.values.get("dynamic") else None
    for name in exceptions.values if exceptions is not None else ():
        assert exceptions is not None
        pattern = compile_pattern(exceptions.place, name.removeprefix("-:").removeprefix("+:"))
        if name.startswith("-:"):
            rules.append(Rule(pattern))
        else:
            changed = values | dict(exceptions.within(name).values)
            rules.append(Rule(pattern, load_gptq_scheme(section.file, changed)))
    lists = values.get("modules_in_block_to_quantize")
    names = [re.escape(name) for item in lists or () for name in item]
    modules = re.compile(rf"model\.layers\.\d+\.(?:{'|'.join(names)})\Z") if names else EVERY_MODULE
    return (*rules, Rule(modules, scheme))


def _kv_cache_dtype(section: ConfigSection) -> str | None:
    """fp8 or None, from the key of each method. AutoFP8 writes `static`."""
    if section.one_of("kv_cache_quant_algo", (None, "FP8")) == "FP8":
        return "fp8"
    scheme = section.values.get("kv_cache_scheme")
    if not isinstance(scheme, dict):
        return "fp8" if section.one_of("kv_cache_scheme", (None, "static")) else None
    inner = section.within("kv_cache_scheme")
    inner.one_of("num_bits", (8,))
    inner.one_of("type", ("float",))
    inner.one_of("symmetric", (True,), True)
    return "fp8"


_LOADERS: dict[str, Callable[[ConfigSection], tuple[Rule, ...]]] = {
    "awq": _awq_rules,
    "gptq": _gptq_rules,
    "compressed-tensors": load_compressed_rules,
    "fp8": load_fp8_rules,
    "modelopt": load_modelopt_rules,
}
