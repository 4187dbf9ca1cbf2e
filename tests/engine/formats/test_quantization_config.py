"""Quantization configurations of known models, and what is refused by its key before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

from gristmill.engine.checkpoint.formats.compressed import IntScheme, PackedScheme
from gristmill.engine.checkpoint.formats.fp8 import FP8Scheme, ScaleLayout
from gristmill.engine.checkpoint.formats.quantization_config import QuantizationPlan, load_plan
from gristmill.engine.errors import ModelRefused

Q_PROJ, GATE, DOWN = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.gate_proj",
    "model.layers.11.mlp.down_proj",
)
LINEARS = (Q_PROJ, GATE, DOWN)
ORDINARY = (
    *("model.embed_tokens", "model.norm", "model.layers.0.input_layernorm"),
    *("model.layers.0.self_attn.q_norm", "model.layers.0.post_attention_layernorm"),
)
INT4_WEIGHTS: dict[str, Any] = json.loads("""
{"actorder": null, "block_structure": null, "dynamic": false, "group_size": 128, "num_bits": 4,
 "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": true, "type": "int"}
""")
FP8_WEIGHTS = INT4_WEIGHTS | {"group_size": None, "num_bits": 8, "strategy": "channel", "type": "float"}
DYNAMIC_TOKENS = FP8_WEIGHTS | {"dynamic": True, "strategy": "token", "observer": None}
STATIC_TENSOR = FP8_WEIGHTS | {"strategy": "tensor"}
# Qwen2.5-7B-Instruct-AWQ, Qwen2.5-7B-Instruct-GPTQ-Int4, Qwen3-FP8, neuralmagic/Meta-Llama-3-8B-Instruct-FP8-KV,
# Ministral-3 and nvidia/Qwen3-8B-FP8
AWQ, GPTQ, QWEN3_FP8, AUTO_FP8, MISTRAL_FP8, MODELOPT = json.loads("""[
{"bits": 4, "group_size": 128, "modules_to_not_convert": null, "quant_method": "awq", "version": "gemm",
 "zero_point": true},
{"batch_size": 1, "bits": 4, "block_name_to_quantize": null, "cache_block_outputs": true, "damp_percent": 0.01,
 "dataset": null, "desc_act": false, "exllama_config": {"version": 1}, "group_size": 128, "max_input_length": null,
 "model_seqlen": null, "module_name_preceding_first_block": null, "modules_in_block_to_quantize": null,
 "pad_token_id": null, "quant_method": "gptq", "sym": true, "tokenizer": null, "true_sequential": true,
 "use_cuda_fp16": false, "use_exllama": true},
{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
 "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"]},
{"activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static", "quant_method": "fp8"},
{"activation_scheme": "static", "dequantize": false, "quant_method": "fp8", "weight_block_size": null,
 "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]},
{"config_groups": {"group_0": {"input_activations": {"dynamic": false, "num_bits": 8, "type": "float"},
                               "weights": {"dynamic": false, "num_bits": 8, "type": "float"},
                               "targets": ["Linear"]}},
 "ignore": ["lm_head"], "kv_cache_scheme": {"dynamic": false, "num_bits": 8, "type": "float"},
 "producer": {"name": "modelopt", "version": "0.33.0"}, "quant_algo": "FP8", "quant_method": "modelopt"}
]""")


def _compressed(storage: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it, with one group."""
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    base: dict[str, Any] = json.loads("""
{"global_compression_ratio": null, "ignore": ["lm_head"], "kv_cache_scheme": null,
 "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {},
 "transform_config": {}, "version": "0.10.3.dev47+ge463fe6"}
""") | {"format": storage, "config_groups": {"group_0": group | more.pop("group", {})}}
    return base | more


def _packed(**weights: Any) -> dict[str, Any]:
    return _compressed("pack-quantized", INT4_WEIGHTS | weights)


def _float(group: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    return _compressed("float-quantized", FP8_WEIGHTS | weights, group=group or {})


W4A16 = _compressed("pack-quantized", INT4_WEIGHTS)  # RedHatAI/Qwen3-8B-quantized.w4a16
FP8_DYNAMIC = _float({"input_activations": DYNAMIC_TOKENS})
FP8_STATIC = _compressed("float-quantized", STATIC_TENSOR, group={"input_activations": STATIC_TENSOR})
W8A8 = _compressed(
    "int-quantized", FP8_WEIGHTS | {"type": "int"}, group={"input_activations": DYNAMIC_TOKENS}
)
BLOCKS: dict[str, Any] = {"strategy": "block", "block_structure": [128, 128]}


def _plan(
    quantization: object, key: str = "quantization_config", folder: str = "/models/m"
) -> QuantizationPlan:
    plan = load_plan(Path(folder), {"model_type": "llama", key: quantization})
    assert plan is not None
    return plan


def _refusal(quantization: object, **config: Any) -> str:
    with pytest.raises(ModelRefused) as caught:
        load_plan(Path("/models/m"), {"quantization_config": quantization} | config)
    assert "\n" not in str(caught.value) and "/models/m/config.json" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("quantization", "label"),
    [
        (AWQ, "awq int4 g128"),
        (GPTQ, "gptq int4 g128"),
        (W4A16, "compressed-tensors int4 g128"),
        (FP8_DYNAMIC, "compressed-tensors fp8 per row"),
        (FP8_STATIC, "compressed-tensors fp8 per tensor"),
        (W8A8, "compressed-tensors int8 per row"),
        (_compressed("naive-quantized", FP8_WEIGHTS), "compressed-tensors fp8 per row"),
        (_float(**BLOCKS), "compressed-tensors fp8 128x128"),
        (QWEN3_FP8, "fp8 128x128"),
        (AUTO_FP8, "fp8 per tensor"),
        (MISTRAL_FP8, "fp8 per tensor"),
        (MODELOPT, "modelopt fp8 per tensor"),
    ],
)
def test_known_configurations_quantize_the_linears_and_nothing_else(
    quantization: dict[str, Any], label: str
) -> None:
    plan = _plan(json.loads(json.dumps(quantization)))
    assert (plan.method, plan.label) == (quantization["quant_method"], label)
    assert all(plan.scheme_of(module) is not None for module in LINEARS)
    assert all(plan.scheme_of(module) is None for module in (*ORDINARY, "lm_head"))


def test_a_model_without_the_keys_has_no_plan(tmp_path: Path) -> None:
    for config in (
        {},
        {"quantization_config": None},
        {"quantization_config": {}},
        {"compression_config": {}},
    ):
        assert load_plan(tmp_path, config) is None


def test_the_storage_follows_the_configuration() -> None:
    assert _plan(W4A16).scheme_of(GATE) == PackedScheme(4, ScaleLayout(1, 128))
    asymmetric = _packed(symmetric=False, actorder="group")
    assert _plan(asymmetric).scheme_of(GATE) == PackedScheme(4, ScaleLayout(1, 128), False, True)
    static_order = _packed(actorder="weight")
    assert _plan(static_order).scheme_of(GATE) == PackedScheme(4, ScaleLayout(1, 128))
    per_row = _packed(group_size=-1, strategy=None, num_bits=8)
    assert _plan(per_row).scheme_of(GATE) == PackedScheme(8, ScaleLayout(1))
    assert _plan(W8A8).scheme_of(GATE) == IntScheme(ScaleLayout(1))
    assert _plan(FP8_STATIC).scheme_of(GATE) == FP8Scheme("compressed-tensors", ScaleLayout())
    assert _plan(QWEN3_FP8).scheme_of(GATE) == FP8Scheme(
        "fp8", ScaleLayout(128, 128), "weight_scale_inv", "activation_scale"
    )
    assert _plan(AUTO_FP8).scheme_of(GATE) == FP8Scheme("fp8", ScaleLayout())
    assert _plan(MISTRAL_FP8).scheme_of(GATE) == FP8Scheme(
        "fp8", ScaleLayout(), "weight_scale_inv", "activation_scale"
    )


def test_older_keys_mean_the_same() -> None:
    assert _plan(W4A16, "compression_config").scheme_of(GATE) == _plan(W4A16).scheme_of(GATE)
    nested = {
        "quant_method": "compressed-tensors",
        "quantization_config": {key: value for key, value in W4A16.items() if key != "quant_method"},
        "sparsity_config": {},
    }
    assert _plan(nested, "compression_config").scheme_of(GATE) == _plan(W4A16).scheme_of(GATE)


def test_modelopt_writes_its_own_file(tmp_path: Path) -> None:
    quantization = {
        "exclude_modules": ["lm_head", "model.layers.0.self_attn*", "model.layers.1?.mlp.down_proj"],
        "kv_cache_quant_algo": "FP8",
        "quant_algo": "FP8",
    }
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization}))
    plan = load_plan(tmp_path, {"model_type": "llama"})
    assert plan is not None and (plan.method, plan.kv_cache_dtype) == ("modelopt", "fp8")
    assert plan.scheme_of(GATE) is not None
    assert [plan.scheme_of(module) for module in (Q_PROJ, DOWN, "lm_head")] == [None, None, None]

    file.write_text(json.dumps({"quantization": quantization | {"quant_algo": "NVFP4"}}))
    with pytest.raises(ModelRefused, match=r"hf_quant_config\.json: quantization\.quant_algo is 'NVFP4'"):
        load_plan(tmp_path, {})


def test_modelopts_own_object_may_lie_inside_config_json() -> None:
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "*o_proj"]}
    plan = _plan({"quant_method": "modelopt", "producer": {"name": "modelopt"}, "quantization": inner})
    assert plan.scheme_of(GATE) is not None and plan.kv_cache_dtype is None
    assert plan.scheme_of(Q_PROJ.replace("q_", "o_")) is None


def test_modelopt_leaves_the_head_alone_unless_its_list_leaves_the_head_out() -> None:
    assert (
        _plan({key: value for key, value in MODELOPT.items() if key != "ignore"}).scheme_of("lm_head") is None
    )
    assert _plan(MODELOPT | {"ignore": []}).scheme_of("lm_head") is not None


def test_compressed_tensors_ignores_names_and_patterns() -> None:
    plan = _plan(W4A16 | {"ignore": ["re:.*self_attn", Q_PROJ.replace("0", "10"), "re:.*\\.11\\..*down"]})
    assert [plan.scheme_of(module) for module in (Q_PROJ, DOWN)] == [None, None]
    assert plan.scheme_of(GATE) is not None and plan.scheme_of("lm_head") is not None
    assert _plan(W4A16 | {"ignore": ["q_proj", "layers"]}).scheme_of(Q_PROJ) is not None  # whole names only


def test_groups_of_compressed_tensors_choose_by_name_then_pattern_then_class() -> None:
    names = {"targets": [Q_PROJ], "weights": INT4_WEIGHTS | {"group_size": 64}, "format": "pack-quantized"}
    patterns = {"targets": ["re:.*self_attn.*"], "weights": STATIC_TENSOR, "format": "float-quantized"}
    classes = {"targets": ["Linear"], "weights": INT4_WEIGHTS, "format": "pack-quantized"}
    groups = {"group_0": classes, "group_1": patterns, "group_2": names}
    plan = _plan(_compressed("mixed-precision", {}, config_groups=groups))
    assert plan.scheme_of(Q_PROJ) == PackedScheme(4, ScaleLayout(1, 64))
    assert plan.scheme_of(Q_PROJ.replace("q_", "k_")) == FP8Scheme("compressed-tensors", ScaleLayout())
    assert plan.scheme_of(GATE) == PackedScheme(4, ScaleLayout(1, 128))
    assert plan.label.count(" + ") == 2


def test_modules_are_chosen_as_the_package_chooses_them() -> None:
    class Linears(torch.nn.Module):
        """Two layers with the names of a decoder."""

        def __init__(self) -> None:
            super().__init__()
            parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
            for name in [f"model.layers.{i}.{part}" for i in range(12) for part in parts] + ["lm_head"]:
                parent: torch.nn.Module = self
                *path, last = name.split(".")
                for step in path:
                    if not hasattr(parent, step):
                        parent.add_module(step, torch.nn.Module())
                    parent = parent.get_submodule(step)
                parent.add_module(last, torch.nn.Linear(32, 32, bias=False))

    group = {"targets": ["re:.*layers\\.1", "re:.*layers\\.[0-4]\\.mlp", DOWN], "weights": INT4_WEIGHTS}
    coarse = {"targets": ["re:.*q_proj", "lm_head"], "weights": INT4_WEIGHTS | {"num_bits": 8}}
    ignore = ["re:.*\\.10\\.", "model.layers.3.mlp.gate_proj", "re:layers", "o_proj"]
    raw = _compressed("pack-quantized", {}, config_groups={"a": group, "b": coarse}, ignore=ignore)
    for part in (group, coarse):
        part["weights"] = {**part["weights"], "group_size": 32}  # type: ignore[dict-item]
    model = Linears()
    theirs = {key: raw[key] for key in ("config_groups", "format", "ignore", "quant_method")}
    apply_quantization_config(model, QuantizationConfig(**theirs))
    plan = _plan(raw)
    expected, found = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            scheme = getattr(module, "quantization_scheme", None)
            expected[name] = None if scheme is None else scheme.weights.num_bits
            ours = plan.scheme_of(name)
            found[name] = ours.num_bits if isinstance(ours, PackedScheme) else None
    assert found == expected
    assert set(expected.values()) == {None, 4, 8}


def test_the_skip_list_of_awq_has_parts_of_names() -> None:
    plan = _plan(AWQ | {"modules_to_not_convert": ["model.layers.1", "gate", "visual"]})
    assert plan.scheme_of(GATE) is None
    assert plan.scheme_of("model.layers.1.mlp.up_proj") is None
    assert plan.scheme_of(DOWN) is not None and plan.scheme_of(Q_PROJ) is not None  # layer 11 is not layer 1


def test_the_skip_list_of_fp8_ends_at_dots() -> None:
    plan = _plan(
        QWEN3_FP8 | {"modules_to_not_convert": ["mlp.gate", "model.layers.1", "model.layers.0.self_attn"]}
    )
    assert plan.scheme_of(GATE) is not None and plan.scheme_of(DOWN) is not None
    assert plan.scheme_of(Q_PROJ) is None and plan.scheme_of("model.layers.1.mlp.up_proj") is None
    assert _plan(QWEN3_FP8 | {"modules_to_not_convert": ["down_proj"]}).scheme_of(DOWN) is None
    assert _plan(AUTO_FP8 | {"ignored_layers": ["re:.*lm_head", Q_PROJ]}).scheme_of(Q_PROJ) is None


def test_gptq_quantizes_the_head_only_with_its_flag() -> None:
    assert _plan(GPTQ).scheme_of("lm_head") is None
    assert _plan(GPTQ | {"lm_head": True}).scheme_of("lm_head") is not None


def test_gptq_honours_exceptions_and_lists_of_modules() -> None:
    dynamic = {"-:.*\\.0\\..*gate": {}, "+:.*\\.0\\.": {"bits": 8, "group_size": 64}, "-:.*q_proj": {}}
    plan = _plan(GPTQ | {"dynamic": dynamic})
    assert plan.scheme_of(GATE) is None
    assert plan.scheme_of(Q_PROJ) != plan.scheme_of(DOWN) and plan.scheme_of(Q_PROJ) is not None
    assert plan.scheme_of(Q_PROJ.replace("0", "1")) is None
    assert plan.label == "gptq int8 g64 + gptq int4 g128"

    lists = [["self_attn.k_proj", "self_attn.q_proj"], ["mlp.down_proj"]]
    plan = _plan(GPTQ | {"modules_in_block_to_quantize": lists})
    assert [plan.scheme_of(module) is None for module in (Q_PROJ, GATE, DOWN)] == [False, True, False]


def test_an_fp8_cache_that_a_checkpoint_asks_for_is_passed_on() -> None:
    kv = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    assert _plan(FP8_STATIC | {"kv_cache_scheme": kv}).kv_cache_dtype == "fp8"
    assert _plan(AUTO_FP8).kv_cache_dtype == "fp8"
    assert _plan(MODELOPT).kv_cache_dtype == "fp8"
    assert _plan(FP8_STATIC).kv_cache_dtype is None


def test_scales_of_the_cache_are_known_tensors() -> None:
    plan = _plan(FP8_STATIC)
    for name in ("k_scale", "v_scale", "kv_scale", "k_proj.k_scale", "v_proj.v_scale", "k_proj.output_scale"):
        assert plan.is_extra(f"model.layers.7.self_attn.{name}"), name
    for name in (
        "model.layers.7.mlp.up_proj.weight_scale",
        "model.layers.7.self_attn.k_proj.weight",
        "lm_head.k_scale",
    ):
        assert not plan.is_extra(name)


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is 'bitsandbytes'"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "quant_method is 'bitsandbytes'"),
        ({"quant_method": "hqq", "quant_config": {}}, "quant_method is 'hqq'"),
        ({"quant_method": "aqlm", "in_group_size": 8}, "quant_method is 'aqlm'"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": []}, "quant_method is 'mxfp4'"),
        ({"quant_method": ["awq"]}, "quant_method is ['awq']"),
        ({"bits": 4}, "quant_method is missing"),
        ("int4", "quantization_config is 'int4'"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        (GPTQ | {"dynamic": {"-:(": {}}}, "dynamic: '(' is not a regular expression"),
        (GPTQ | {"dynamic": {".*q_proj": {"bits": 2}}}, "bits is 2"),
        (GPTQ | {"dynamic": {".*q_proj": 8}}, "dynamic..*q_proj is 8"),
        (GPTQ | {"block_name_to_quantize": "model.decoder"}, "block_name_to_quantize is 'model.decoder'"),
        (_compressed("marlin-24", INT4_WEIGHTS), "format is 'marlin-24'"),
        (_compressed("nvfp4-pack-quantized", INT4_WEIGHTS), "format is 'nvfp4-pack-quantized'"),
        (_compressed("dense", INT4_WEIGHTS), "format is 'dense'"),
        (_compressed("mixed-precision", INT4_WEIGHTS), "format is 'mixed-precision'"),
        (
            W4A16 | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format is 'sparse-24-bitmask'",
        ),
        (
            W4A16 | {"transform_config": {"config_groups": {"R1": {}}}},
            "transform_config.config_groups is {'R1'",
        ),
        (W4A16 | {"new_rotation": "hadamard"}, "new_rotation is 'hadamard'"),
        (W4A16 | {"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16 is ['Linear']"),
        (W4A16 | {"config_groups": None}, "config_groups is None"),
        (W4A16 | {"ignore": ["re:["]}, "'[' is not a regular expression"),
        (_packed(num_bits=3), "group_0.weights.num_bits is 3"),
        (_packed(type="float"), "weights.type is 'float'"),
        (_packed(strategy="tensor_group"), "strategy is 'tensor_group'"),
        (_packed(group_size=0), "group_size is 0"),
        (_packed(actorder="mystery"), "actorder is 'mystery'"),
        (_packed(dynamic=True), "weights.dynamic is True"),
        (_packed(codebook="nf4"), "weights.codebook is 'nf4'"),
        (_compressed("int-quantized", INT4_WEIGHTS | {"actorder": "group"}), "actorder is 'group'"),
        (_float(symmetric=False), "symmetric is False"),
        (_float(num_bits=4), "num_bits is 4"),
        (_float(strategy="block", block_structure=[128]), "block_structure is [128]"),
        (
            _compressed("pack-quantized", INT4_WEIGHTS, group={"targets": ["Linear", "Embedding"]}),
            "targets is ['Linear', 'Embedding']",
        ),
        (_float(group={"output_activations": STATIC_TENSOR}), "output_activations"),
        (FP8_STATIC | {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme.type is 'int'"),
        (FP8_STATIC | {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "kv_cache_scheme.num_bits is 4"),
        (AUTO_FP8 | {"kv_cache_scheme": "int4"}, "kv_cache_scheme is 'int4'"),
        (QWEN3_FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        (QWEN3_FP8 | {"weight_block_size": [128, 0]}, "weight_block_size is [128, 0]"),
        (QWEN3_FP8 | {"weight_block_size": 128}, "weight_block_size is 128"),
        (
            QWEN3_FP8 | {"modules_to_convert": ["model.embed_tokens"]},
            "modules_to_convert is ['model.embed_tokens']",
        ),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        (MODELOPT | {"kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo is 'INT8'"),
    ],
)
def test_what_is_not_understood_is_refused_by_its_key(quantization: object, said: str) -> None:
    text = _refusal(quantization)
    assert said in text
    assert "; " in text  # what is wrong; what to do
