"""What the quantization_config of a compressed-tensors checkpoint says: which modules are stored in which way.

A module takes the first of: `ignore` (an ordinary weight), a target that is its name, a target that is a regular
expression, a target that is its class. Only weights count; what is said of activations changes nothing here.
"""

from __future__ import annotations

import re

from gristmill.engine.checkpoint.formats.compressed import IntScheme, PackedScheme
from gristmill.engine.checkpoint.formats.config_section import ConfigSection
from gristmill.engine.checkpoint.formats.fp8 import FP8Scheme, ScaleLayout
from gristmill.engine.checkpoint.formats.rules import EVERY_MODULE, Rule, compile_pattern, exact_pattern
from gristmill.engine.checkpoint.formats.scheme import Scheme

METHOD = "compressed-tensors"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
KEYS = {
    *("quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "sparsity_config"),
    *("quantization_status", "global_compression_ratio", "version", "run_compressed", "transform_config"),
}
GROUP_KEYS = {"targets", "weights", "input_activations", "output_activations", "format"}
WEIGHT_KEYS = {
    *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder"),
    *("observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
}
LINEAR_CLASS = "Linear"


def load_compressed_rules(section: ConfigSection) -> tuple[Rule, ...]:
    """Rules of every group. Raises ModelRefused for what can't be honoured."""
    section.refuse_unknown(KEYS)
    _refuse_sparsity(section)
    _refuse_transforms(section)
    section.one_of("format", (*FORMATS, "mixed-precision"))
    groups = section.within("config_groups")
    schemes: dict[str, Scheme] = {}
    for key in groups.values:
        group = groups.within(key)
        scheme = _group_scheme(group, section)
        if scheme is not None:
            schemes |= dict.fromkeys(_targets(group), scheme)
    named = sorted(target for target in schemes if target != LINEAR_CLASS)
    ordered = sorted(named, key=lambda target: target.startswith("re:"))
    rules = [Rule(_pattern(section, name)) for name in section.strings("ignore") or ()]
    rules += [Rule(_pattern(section, target), schemes[target]) for target in ordered]
    if LINEAR_CLASS in schemes:
        rules.append(Rule(EVERY_MODULE, schemes[LINEAR_CLASS]))
    return tuple(rules)


def _pattern(section: ConfigSection, name: str) -> re.Pattern[str]:
    """A name, or a regular expression after re: that matches from a name's start; the class matches every module."""
    if name == LINEAR_CLASS:
        return EVERY_MODULE
    if name.startswith("re:"):
        return compile_pattern(section.place, name.removeprefix("re:"))
    return exact_pattern(name)


def _targets(group: ConfigSection) -> tuple[str, ...]:
    targets = group.strings("targets") or ()
    if any("embed" in target.lower() for target in targets):
        raise group.refused("targets", "embeddings must keep ordinary weights, quantize only Linear modules")
    return targets


def _refuse_sparsity(section: ConfigSection) -> None:
    """A dense format stores zeros as ordinary weights; the others leave them out."""
    if section.values.get("sparsity_config"):
        section.within("sparsity_config").one_of("format", ("dense",), "dense")


def _refuse_transforms(section: ConfigSection) -> None:
    """A rotation that is folded into the weights leaves no entry; one that runs with the model does."""
    if section.values.get("transform_config"):
        section.within("transform_config").refuse_unknown(())


def _group_scheme(group: ConfigSection, section: ConfigSection) -> Scheme | None:
    """None: the group says nothing of weights."""
    group.refuse_unknown(GROUP_KEYS)
    if group.values.get("output_activations"):
        raise group.refused("output_activations")
    if group.values.get("weights") is None:
        return None
    holder = section if group.values.get("format") is None else group
    storage = holder.one_of("format", FORMATS)
    weights = group.within("weights")
    weights.refuse_unknown(WEIGHT_KEYS)
    weights.one_of("dynamic", (False,), False)
    kinds = {"pack-quantized": ("int",), "int-quantized": ("int",), "float-quantized": ("float",)}
    kind = weights.one_of("type", kinds.get(storage, ("int", "float")), "int")
    is_symmetric = weights.one_of("symmetric", (True, False), True)
    if kind == "float":
        weights.one_of("num_bits", (8,), 8)
        weights.one_of("symmetric", (True,), True)
        return FP8Scheme(METHOD, _layout(weights, ("tensor", "channel", "group", "block")))
    num_bits = weights.one_of("num_bits", (4, 8), 8)
    if storage != "pack-quantized":
        _has_order(weights, can_have=False)
        return IntScheme(_layout(weights, ("tensor", "channel", "group", "block")), is_symmetric)
    layout = _layout(weights, ("channel", "group"))
    return PackedScheme(num_bits, layout, is_symmetric, _has_order(weights))


def _layout(weights: ConfigSection, allowed: tuple[str, ...]) -> ScaleLayout:
    """The strategy; where it isn't said it follows from the group size."""
    size = weights.values.get("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.one_of("strategy", allowed, implied)
    if strategy not in allowed:
        raise weights.refused("strategy", f"Gristmill reads {', '.join(allowed)}; quantize the model again")
    if strategy == "tensor":
        return ScaleLayout()
    if strategy == "channel":
        return ScaleLayout(1)
    if strategy == "group":
        return ScaleLayout(1, weights.size("group_size"))
    return ScaleLayout(*weights.sizes("block_structure"))


def _has_order(weights: ConfigSection, can_have: bool = True) -> bool:
    """Whether columns are grouped by weight_g_idx. `weight` and `static` order them while quantizing only."""
    plain: tuple[object, ...] = (None, False, "weight", "static")
    order = weights.one_of("actorder", (*plain, True, "group", "dynamic") if can_have else plain)
    return order not in plain
