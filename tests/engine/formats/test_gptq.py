"""GPTQ's packing: literal bytes, every variant against float64, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.engine.checkpoint.formats.gptq import GptqScheme, ZeroForm, load_gptq_scheme
from gristmill.engine.checkpoint.formats.scheme import FLOAT_TYPES, Stored
from gristmill.engine.errors import ModelRefused
from tests.engine.formats.packers_int4 import exact_weight, pack_gptq_lines, pack_gptq_tensors

Array = NDArray[np.int64]
NAME = "model.layers.0.mlp.up_proj"
PATH = "/models/m/config.json"
FORMS: tuple[ZeroForm, ...] = ("same", "less_one", "words_less_one")

# The codes of row n and column k are n + k: one word a row, its first column in the lowest bits.
GOLDEN_INT4 = "10325476 21436587 32547698 436587a9 547698ba 6587a9cb 7698badc 87a9cbed"
# Zero points 0 to 7 of eight rows: as they are; each less one, 0 becoming 15; 0x76543210 - 0x11111111 = 0x654320ff.
GOLDEN_ZEROS = {"same": "10325476", "less_one": "0f214365", "words_less_one": "ff204365"}
# Row n, column k: 32 n + 3 k, columns 0 to 3 of all rows and then columns 4 to 7.
GOLDEN_INT8 = "00030609 20232629 40434649 60636669 80838689 a0a3a6a9 c0c3c6c9 e0e3e6e9"
GOLDEN_INT8 += " 0c0f1215 2c2f3235 4c4f5255 6c6f7275 8c8f9295 acafb2b5 cccfd2d5 eceff2f5"
GOLDEN_INT8_ZEROS = "7f808182 7b7c7d7e"  # less one: zero points 128 129 130 131 124 125 126 127


def words(text: str, num_lines: int) -> Tensor:
    """Bytes in the order of the file, as int32 [num_lines, n]."""
    return torch.from_numpy(np.frombuffer(bytes.fromhex(text), "<i4").copy()).view(num_lines, -1)


def in_order(num_columns: int, num_groups: int) -> Array:
    return np.arange(num_columns) * num_groups // num_columns


def shuffled(num_columns: int, num_groups: int) -> Array:
    return np.random.default_rng(5).permutation(in_order(num_columns, num_groups))


def random_case(
    num_rows: int, num_columns: int, num_groups: int, bits: int = 4, dtype: torch.dtype = torch.float16
) -> tuple[Array, Array, Tensor]:
    """Codes, zero points with several 0, and scales, two of them 0 and one negative."""
    rng = np.random.default_rng(num_rows + bits)
    q = rng.integers(0, 1 << bits, (num_rows, num_columns))
    zeros = rng.integers(0, 1 << bits, (num_groups, num_rows))
    zeros[0, ::3] = 0
    scales = torch.from_numpy(rng.uniform(0.001, 0.1, (num_groups, num_rows))).to(dtype)
    scales[0, :2] = 0
    scales[-1, -1] *= -1
    return q, zeros, scales


def tensors_of(
    q: Array, zeros: Array, scales: Tensor, groups: Array | None, bits: int = 4, form: ZeroForm = "same"
) -> dict[str, Tensor]:
    packed = pack_gptq_tensors(q, zeros, bits, form)
    tensors = {name: torch.from_numpy(value) for name, value in packed.items()} | {"scales": scales}
    if groups is not None:
        tensors["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return tensors


def expected_weight(q: Array, zeros: Array, scales: Tensor, groups: Array) -> Tensor:
    return torch.from_numpy(exact_weight(q, zeros, scales.double().numpy(), groups))


@pytest.mark.parametrize("form", FORMS)
def test_literal_bytes_become_the_codes_and_zero_points_written_by_hand(form: ZeroForm) -> None:
    tensors = {
        "qweight": words(GOLDEN_INT4, 1),
        "qzeros": words(GOLDEN_ZEROS[form], 1),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    weight = GptqScheme(4, 8, form).build(NAME, tensors)
    assert weight.codes.numpy().tobytes() == bytes.fromhex(GOLDEN_INT4)
    rows, columns = torch.arange(8).view(-1, 1), torch.arange(8)
    assert torch.equal(weight.dequantize(), (rows + columns - rows).float())


def test_literal_bytes_of_8_bits_become_signed_codes() -> None:
    tensors = {
        "qweight": words(GOLDEN_INT8, 2),
        "qzeros": words(GOLDEN_INT8_ZEROS, 1),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    weight = GptqScheme(8, -1, "less_one").build(NAME, tensors)
    rows, columns = torch.arange(8).view(-1, 1), torch.arange(8)
    assert torch.equal(weight.codes.int(), 32 * rows + 3 * columns - 128)
    zeros = torch.tensor([128, 129, 130, 131, 124, 125, 126, 127]).view(-1, 1)
    assert torch.equal(weight.dequantize(), (32 * rows + 3 * columns - zeros).float())


def test_literal_bytes_in_another_order_of_columns_are_grouped_stably() -> None:
    tensors = {
        "qweight": words(GOLDEN_INT4, 1),
        "qzeros": words("88888888 88888888", 2),
        "scales": torch.tensor([[1.0], [2.0]]).expand(2, 8).half(),
        "g_idx": torch.tensor([1, 0, 1, 0, 1, 0, 1, 0], dtype=torch.int32),
    }
    weight = GptqScheme(4, 4, "same", has_order=True).build(NAME, tensors)
    assert weight.columns is not None
    assert weight.columns.tolist() == [1, 3, 5, 7, 0, 2, 4, 6]
    assert weight.codes[0].numpy().tobytes() == bytes.fromhex("31752064")
    assert weight.dequantize()[0].tolist() == [-16, -7, -12, -5, -8, -3, -4, -1]


def test_the_packer_writes_the_literal_bytes() -> None:
    q = np.add.outer(np.arange(8), np.arange(8))
    for form in FORMS:
        packed = pack_gptq_tensors(q, np.arange(8)[None], 4, form)
        assert packed["qweight"].tobytes() == bytes.fromhex(GOLDEN_INT4)
        assert packed["qzeros"].tobytes() == bytes.fromhex(GOLDEN_ZEROS[form])
    q = np.add.outer(32 * np.arange(8), 3 * np.arange(8))
    packed = pack_gptq_tensors(q, np.array([[128, 129, 130, 131, 124, 125, 126, 127]]), 8, "less_one")
    assert packed["qweight"].tobytes() == bytes.fromhex(GOLDEN_INT8)
    assert packed["qzeros"].tobytes() == bytes.fromhex(GOLDEN_INT8_ZEROS)


@pytest.mark.parametrize("order", ["no g_idx", "in order", "act order"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "group_size"), [(8, 8, 4), (24, 96, 32), (16, 128, 128), (40, 64, -1)]
)
def test_a_weight_is_code_less_zero_point_times_scale(
    num_rows: int, num_columns: int, group_size: int, bits: int, form: ZeroForm, order: str
) -> None:
    num_groups = 1 if group_size == -1 else num_columns // group_size
    q, zeros, scales = random_case(num_rows, num_columns, num_groups, bits)
    groups = (shuffled if order == "act order" else in_order)(num_columns, num_groups)
    tensors = tensors_of(q, zeros, scales, None if order == "no g_idx" else groups, bits, form)
    scheme = GptqScheme(bits, group_size, form, has_order=order == "act order")
    stored = scheme.stored(num_rows, num_columns)
    for name, tensor in tensors.items():
        assert stored[name].shape == tuple(tensor.shape), name
    weight = scheme.build(NAME, tensors)
    assert (weight.columns is not None) == (order == "act order" and num_groups > 1)
    assert torch.equal(weight.dequantize().double(), expected_weight(q, zeros, scales, groups))


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 0.0), (torch.float32, 2.0**-19)])
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_of_other_types_are_read(bits: int, dtype: torch.dtype, rtol: float) -> None:
    q, zeros, scales = random_case(16, 64, 2, bits, dtype)
    weight = GptqScheme(bits, 32).build(NAME, tensors_of(q, zeros, scales, None, bits, "less_one"))
    expected = expected_weight(q, zeros, scales, in_order(64, 2))
    atol = rtol * 2**bits * 0.1 * 2**-4
    torch.testing.assert_close(weight.dequantize().double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("symmetric", [True, None])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", FORMS)
def test_a_symmetric_checkpoint_needs_no_offsets(form: ZeroForm, bits: int, symmetric: bool | None) -> None:
    q, zeros, scales = random_case(16, 64, 2, bits)
    zeros = np.full_like(zeros, 1 << (bits - 1))
    weight = GptqScheme(bits, 32, form, symmetric).build(NAME, tensors_of(q, zeros, scales, None, bits, form))
    assert weight.offsets is None
    assert weight.scales.dtype == torch.float16
    assert weight.bits_per_weight == bits + 16 / 32
    assert torch.equal(weight.dequantize().double(), expected_weight(q, zeros, scales, in_order(64, 2)))


def test_symmetric_zero_points_stored_as_they_are_under_the_old_name_are_still_8() -> None:
    q, zeros, scales = random_case(16, 64, 2)
    zeros = np.full_like(zeros, 8)
    tensors = tensors_of(q, zeros, scales, None, form="same")
    weight = load_gptq_scheme(
        PATH, {"bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq"}
    ).build(NAME, tensors)
    assert weight.offsets is None
    assert torch.equal(weight.dequantize().double(), expected_weight(q, zeros, scales, in_order(64, 2)))


@pytest.mark.parametrize(
    ("form", "first", "other", "shown"),
    [
        ("less_one", 7, 6, 6),
        ("less_one", 0, 0, 0),
        ("same", 7, 7, 7),
        ("same", 8, 3, 3),
        ("less_one", 8, 7, 7),
    ],
)
def test_zero_points_that_contradict_sym_are_refused(
    form: ZeroForm, first: int, other: int, shown: int
) -> None:
    q, zeros, scales = random_case(16, 64, 2)
    zeros[:] = first
    zeros[1, 5] = other
    tensors = tensors_of(q, zeros, scales, None, form="same")
    with pytest.raises(ModelRefused, match=f"^tensor {NAME}.qzeros holds {shown}, but where sym is true"):
        GptqScheme(4, 32, form, True).build(NAME, tensors)


def test_an_index_of_zeros_means_columns_in_order_only_without_act_order() -> None:
    q, zeros, scales = random_case(16, 64, 2)
    tensors = tensors_of(q, zeros, scales, np.zeros(64, np.int64))
    weight = GptqScheme(4, 32, "same").build(NAME, tensors)
    assert weight.columns is None
    assert torch.equal(weight.dequantize().double(), expected_weight(q, zeros, scales, in_order(64, 2)))
    with pytest.raises(ModelRefused, match=f"^tensor {NAME}.g_idx puts 64 columns in group 0, not 32; "):
        GptqScheme(4, 32, "same", has_order=True).build(NAME, tensors)


@pytest.mark.parametrize(
    ("column", "group", "message"),
    [
        (3, 1, "puts 31 columns in group 0, not 32; "),
        (3, 2, "names group 2, but there are 2; "),
        (63, -1, "names group -1, but there are 2; "),
    ],
)
def test_an_index_that_makes_no_equal_groups_is_refused(column: int, group: int, message: str) -> None:
    q, zeros, scales = random_case(16, 64, 2)
    groups = in_order(64, 2)
    groups[column] = group
    with pytest.raises(ModelRefused, match=f"^tensor {NAME}.g_idx {message}"):
        GptqScheme(4, 32).build(NAME, tensors_of(q, zeros, scales, groups))


def test_an_index_that_is_not_of_integers_is_refused() -> None:
    q, zeros, scales = random_case(16, 64, 2)
    tensors = tensors_of(q, zeros, scales, in_order(64, 2))
    tensors["g_idx"] = tensors["g_idx"].float()
    with pytest.raises(ModelRefused, match=f"^tensor {NAME}.g_idx holds torch.float32, not int32; "):
        GptqScheme(4, 32).build(NAME, tensors)


def test_the_stored_tensors_are_named_with_their_shapes() -> None:
    assert GptqScheme(4, 128).stored(64, 256) == {
        "qweight": Stored((32, 64), ("I32",)),
        "qzeros": Stored((2, 8), ("I32",)),
        "scales": Stored((2, 64), FLOAT_TYPES),
        "g_idx": Stored((256,), ("I32", "I64"), is_optional=True),
    }
    assert GptqScheme(8, -1, has_order=True).stored(64, 256) == {
        "qweight": Stored((64, 64), ("I32",)),
        "qzeros": Stored((1, 16), ("I32",)),
        "scales": Stored((1, 64), FLOAT_TYPES),
        "g_idx": Stored((256,), ("I32", "I64")),
    }


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "message"),
    [
        (64, 576, "group size 128 does not divide its 576 columns; "),
        (12, 256, r"gptq packs 8 rows or columns together, which \[12, 256\] can't be cut into; "),
    ],
)
def test_a_matrix_that_the_format_can_not_hold_is_refused(
    num_rows: int, num_columns: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        GptqScheme(4, 128).stored(num_rows, num_columns)


@pytest.mark.parametrize(
    ("raw", "scheme", "label"),
    [
        ({}, GptqScheme(4, 128), "gptq int4 g128"),
        ({"sym": True, "desc_act": False}, GptqScheme(4, 128, is_symmetric=True), "gptq int4 g128"),
        (
            {"sym": False, "desc_act": True},
            GptqScheme(4, 128, "less_one", False, True),
            "gptq int4 g128 act-order",
        ),
        ({"desc_act": True, "static_groups": True}, GptqScheme(4, 128), "gptq int4 g128"),
        ({"desc_act": True, "group_size": -1}, GptqScheme(4, -1), "gptq int4 per row"),
        ({"bits": 8, "checkpoint_format": "gptq_v2"}, GptqScheme(8, 128, "same"), "gptq int8 g128"),
        ({"format": "gptq_v2"}, GptqScheme(4, 128, "same"), "gptq int4 g128"),
        (
            {"meta": {"quantizer": ["gptqmodel:5.0.0"]}},
            GptqScheme(4, 128, "words_less_one"),
            "gptq int4 g128",
        ),
        ({"meta": {"quantizer": "gptqmodel:1.4.2"}}, GptqScheme(4, 128, "words_less_one"), "gptq int4 g128"),
        ({"meta": {"quantizer": ["intel/auto-round:0.2"]}}, GptqScheme(4, 128), "gptq int4 g128"),
        ({"dynamic": None, "lm_head": True, "damp_percent": 0.1}, GptqScheme(4, 128), "gptq int4 g128"),
    ],
)
def test_configurations_are_read(raw: dict[str, Any], scheme: GptqScheme, label: str) -> None:
    found = load_gptq_scheme(PATH, {"quant_method": "gptq", "bits": 4, "group_size": 128} | raw)
    assert (found, found.label) == (scheme, label)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"bits": 3}, "bits is 3, which is not supported; Gristmill reads 4, 8; "),
        ({"bits": None}, "bits is None, "),
        ({"group_size": -2}, "group_size is -2, "),
        ({"group_size": None}, "group_size is None, "),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', "),
        ({"format": "bitblas"}, "format is 'bitblas', "),
        ({"is_marlin_format": True}, "is_marlin_format is True, "),
        ({"sym": "yes"}, "sym is 'yes', "),
        ({"desc_act": "no"}, "desc_act is 'no', "),
        ({"static_groups": "no"}, "static_groups is 'no', "),
        ({"pack_dtype": "int64"}, "pack_dtype is 'int64', "),
        ({"adapter": {"name": "lora"}}, "adapter is {'name': 'lora'}, "),
        ({"rotation": "hadamard"}, "rotation is 'hadamard', "),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic is {'+:.*down.*': {'bits': 8}}, "),
    ],
)
def test_what_is_not_supported_is_refused_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelRefused) as caught:
        load_gptq_scheme(PATH, {"bits": 4, "group_size": 128} | raw)
    assert str(caught.value).startswith(f"{PATH}: quantization_config.{message}")
    assert "\n" not in str(caught.value)


def test_words_of_the_packer_are_bytes_in_order() -> None:
    assert pack_gptq_lines(np.arange(8)[None], 8).tobytes() == bytes(range(8))
