"""The bytes that doctor says each part of a model takes, against what is loaded and against sums by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from math import prod

import pytest
import torch

from gristmill.engine.checkpoint.gguf_quants import row_bytes
from gristmill.engine.checkpoint.opening import Checkpoint, load_checkpoint, resolve_dtype
from gristmill.engine.checkpoint.tensor_sources import QuantizedSource, TensorSource
from gristmill.engine.checkpoint.weight_names import expected_shapes
from gristmill.engine.checkpoint.weights import iterate_weights
from gristmill.engine.config import ModelConfig
from gristmill.kernels.quantized import QuantizedTensor
from gristmill.worker.tools.doctor.check import Check, PartSize
from gristmill.worker.tools.doctor.model import check_model, measure_model, to_size_lines
from gristmill.worker.tools.doctor.run import to_checks_payload, to_checks_text

CONFIG = ModelConfig(
    architecture="qwen2",
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    context_size=128,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    qkv_bias=True,
)
ATTENTION_WEIGHTS = 2 * (256 + 128 + 128 + 256) * 256
ATTENTION_BIASES = 2 * (256 + 128 + 128)
MLP_WEIGHTS = 2 * 3 * 512 * 256
NORM_WEIGHTS = 5 * 256


@dataclass(frozen=True)
class MadeUpScheme:
    """All of a Scheme that headers are read for."""

    label: str


def build_checkpoint(types: dict[str, str], **flags: bool) -> Checkpoint:
    """A checkpoint of headers alone. types: what tensors have whose name holds the word; the others have BF16."""
    config = replace(CONFIG, **flags)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        kind = next((kind for word, kind in types.items() if word in name), "BF16")
        size = prod(shape[:-1]) * row_bytes(kind, shape[-1])
        tensors[name] = TensorSource("model", 0, size, shape, kind)
    return Checkpoint("model", "gguf", config, "bfloat16", tensors)


def parts_of(checkpoint: Checkpoint, dtype: str = "float32") -> list[PartSize]:
    return list(measure_model(checkpoint, dtype).parts)


def test_smollm2_takes_five_bits_a_weight_and_its_head_is_the_embedding(smollm2_path: str) -> None:
    check = check_model(smollm2_path)
    assert check.size is not None
    by_name = {part.part: part for part in check.size.parts}
    assert list(by_name) == ["embedding", "attention", "mlp", "head", "norms"]
    found = {name: (part.type, part.loaded_as, part.bits_per_weight) for name, part in by_name.items()}
    assert found["attention"] == found["mlp"] == ("q4_1", "int4", 5.0)
    assert found["embedding"] == found["head"] == ("q8_0", "int8", 8.5)
    assert [part.part for part in check.size.parts if part.is_shared] == ["head"]
    assert by_name["embedding"].num_bytes == 49152 * 576 * 17 // 16
    assert by_name["mlp"].num_weights == 30 * 3 * 576 * 1536
    value_bytes = 4 if resolve_dtype("auto") == "float32" else 2
    assert check.size.kv_bytes_per_token == 2 * 30 * 3 * 64 * value_bytes


def test_what_is_counted_from_headers_is_what_loading_takes(smollm2_path: str) -> None:
    checkpoint = load_checkpoint(smollm2_path)
    loaded: Counter[str] = Counter()
    words = {"embed": "embedding", "attn": "attention", "mlp": "mlp"}
    for name, weight in iterate_weights(checkpoint, torch.bfloat16):
        part = next((words[p] for p in words if p in name and "norm" not in name), "norms")
        is_code = isinstance(weight, QuantizedTensor)
        loaded[part] += weight.num_bytes if is_code else weight.numel() * weight.element_size()
    size = measure_model(checkpoint, "bfloat16")
    assert {part.part: part.num_bytes for part in size.parts if not part.is_shared} == loaded
    assert size.num_bytes == loaded.total()


@pytest.mark.parametrize(("dtype", "value_bytes"), [("bfloat16", 2), ("float32", 4)])
def test_floats_are_counted_in_the_type_they_are_loaded_in(dtype: str, value_bytes: int) -> None:
    size = measure_model(build_checkpoint({"norm": "F32"}), dtype)
    attention = ATTENTION_WEIGHTS + ATTENTION_BIASES
    weights = dict(embedding=256_000, attention=attention, mlp=MLP_WEIGHTS, head=256_000, norms=NORM_WEIGHTS)
    assert list(size.parts) == [
        PartSize(part, "float32" if part == "norms" else "bfloat16", dtype, count, value_bytes * count)
        for part, count in weights.items()
    ]
    assert (size.kv_dtype, size.kv_bytes_per_token) == (dtype, 2 * 2 * 2 * 64 * value_bytes)


def test_a_part_of_several_types_has_a_line_for_each() -> None:
    found = parts_of(build_checkpoint({"v_proj.weight": "Q6_K", "proj.weight": "Q4_K"}))
    assert [part for part in found if part.part == "attention"] == [
        PartSize("attention", "q4_k", "int4", 327_680, 327_680 * 6 // 8),
        PartSize("attention", "q6_k", "int8", 65_536, 65_536 * 10 // 8),
        PartSize("attention", "bfloat16", "float32", ATTENTION_BIASES, 4 * ATTENTION_BIASES),
    ]


def test_a_norm_in_blocks_is_no_matrix_and_loaded_as_floats() -> None:
    found = parts_of(build_checkpoint({"model.norm": "Q8_0"}))
    assert found[-1] == PartSize("norms", "q8_0", "float32", 256, 1024)


def test_a_tied_head_of_floats_is_packed_and_counted_beside_the_embedding() -> None:
    size = measure_model(build_checkpoint({}, tie_embeddings=True), "float32")
    assert PartSize("head", "bfloat16", "float32", 256_000, 1_024_000) in size.parts
    tied = measure_model(build_checkpoint({"embed": "Q8_0"}, tie_embeddings=True), "float32")
    assert size.num_bytes - tied.num_bytes == 2 * 1_024_000 - 272_000


def test_a_weight_of_several_tensors_takes_the_bytes_of_all() -> None:
    plain = build_checkpoint({})
    tensors = dict(plain.tensors)
    for name, (rows, columns) in ((n, source.shape) for n, source in plain.tensors.items() if ".mlp." in n):
        codes = TensorSource("model", 0, rows * columns // 2, (columns // 8, rows), "I32")
        scales = TensorSource("model", 0, rows * columns // 64, (columns // 128, rows), "F16")
        parts = {"qweight": codes, "scales": scales}
        tensors[name] = QuantizedSource(MadeUpScheme("gptq int4 g128"), parts, (rows, columns))  # type: ignore[arg-type]
    size = measure_model(replace(plain, tensors=tensors), "bfloat16")
    (mlp,) = [part for part in size.parts if part.part == "mlp"]
    assert mlp == PartSize("mlp", "gptq int4 g128", "gptq int4 g128", MLP_WEIGHTS, MLP_WEIGHTS * 33 // 64)
    assert mlp.bits_per_weight == 4.125
    assert list(to_size_lines(size))[2].endswith("4.12 bits a weight, gptq int4 g128")


def test_the_sizes_stand_under_the_models_line_and_in_the_payload() -> None:
    types = {"proj.weight": "Q4_1", "embed": "Q8_0"}
    size = measure_model(build_checkpoint(types, tie_embeddings=True, qkv_bias=False), "float32")
    check = Check("model", "ok", "a model", size=size)
    assert to_checks_text([check]).splitlines() == [
        "ok    model            a model",
        f"{'':<23}embedding          0.3 MiB  8.50 bits a weight, q8_0 as int8",
        f"{'':<23}attention          0.2 MiB  5.00 bits a weight, q4_1 as int4",
        f"{'':<23}mlp                0.5 MiB  5.00 bits a weight, q4_1 as int4",
        f"{'':<23}head               0.3 MiB  8.50 bits a weight, q8_0 as int8, the embedding's bytes",
        f"{'':<23}norms              0.0 MiB  32.00 bits a weight, bfloat16 as float32",
        f"{'':<23}all weights        1.0 MiB",
        f"{'':<23}KV cache         2,048 bytes a token, float32",
    ]
    found = to_checks_payload([check])["checks"][0]["size"]
    attention = PartSize("attention", "q4_1", "int4", ATTENTION_WEIGHTS, ATTENTION_WEIGHTS * 5 // 8)
    assert found["parts"][1] == asdict(attention) | {"bits_per_weight": 5.0}
    assert found["num_bytes"] == 272_000 + (ATTENTION_WEIGHTS + MLP_WEIGHTS) * 5 // 8 + NORM_WEIGHTS * 4
    assert (found["kv_dtype"], found["kv_bytes_per_token"]) == ("float32", 2048)


@pytest.mark.parametrize("check", [Check("disk", "ok", "lots"), check_model("null:")])
def test_a_finding_without_weights_has_no_size(check: Check) -> None:
    assert set(to_checks_payload([check])["checks"][0]) == {"name", "state", "detail", "remedy"}
    assert len(to_checks_text([check]).splitlines()) == 1
