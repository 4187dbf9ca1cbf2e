"""AWQ's gemm packing and GPTQ's: literal bytes, every variant against float64, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.engine.checkpoint.formats.awq import AwqScheme, load_awq_scheme
from gristmill.engine.checkpoint.formats.gptq import GptqScheme, ZeroForm, load_gptq_scheme
from gristmill.engine.checkpoint.formats.scheme import FLOAT_TYPES, Scheme, Stored
from gristmill.engine.errors import ModelRefused
from tests.engine.formats.packers_int4 import (
    exact_weight,
    pack_awq_tensors,
    pack_gptq_lines,
    pack_gptq_tensors,
)

Array = NDArray[np.int64]
NAME = "model.layers.0.mlp.up_proj"
PATH = "/models/m/config.json"
FORMS: tuple[ZeroForm, ...] = ("same", "less_one", "words_less_one")
SHAPES = [(8, 8, 4), (24, 96, 32), (16, 128, 128), (40, 64, -1)]  # rows, columns, group size
ROWS, COLUMNS = torch.arange(8).view(-1, 1), torch.arange(8)

# The codes of row n and column k are n + k. GPTQ: one word a row, its first column in the lowest bits.
GOLDEN = "10325476 21436587 32547698 436587a9 547698ba 6587a9cb 7698badc 87a9cbed"
# AWQ: one word a column; column 0 has rows 0 2 4 6 1 3 5 7 from its low bits up: 0x75316420.
GOLDEN_AWQ = "20643175 31754286 42865397 539764a8 64a875b9 75b986ca 86ca97db 97dba8ec"
GOLDEN_AWQ_ZEROS = "20643175 df9bce8a"  # groups of four columns: 0 1 2 3 4 5 6 7, then 15 14 13 12 11 10 9 8
# Zero points 0 to 7 of eight rows: as they are; each less one, 0 becoming 15; 0x76543210 - 0x11111111 = 0x654320ff.
GOLDEN_ZEROS = {"same": "10325476", "less_one": "0f214365", "words_less_one": "ff204365"}
# Row n, column k: 32 n + 3 k, columns 0 to 3 of all rows and then columns 4 to 7.
GOLDEN_INT8 = "00030609 20232629 40434649 60636669 80838689 a0a3a6a9 c0c3c6c9 e0e3e6e9"
GOLDEN_INT8 += " 0c0f1215 2c2f3235 4c4f5255 6c6f7275 8c8f9295 acafb2b5 cccfd2d5 eceff2f5"
INT8_ZEROS = [128, 129, 130, 131, 124, 125, 126, 127]
GOLDEN_INT8_ZEROS = "7f808182 7b7c7d7e"  # each less one


def words(text: str, num_lines: int) -> Tensor:
    """Bytes in the order of the file, as int32 [num_lines, n]."""
    return torch.from_numpy(np.frombuffer(bytes.fromhex(text), "<i4").copy()).view(num_lines, -1)


def literal(qweight: Tensor, qzeros: Tensor, **more: Tensor) -> dict[str, Tensor]:
    return {"qweight": qweight, "qzeros": qzeros, "scales": torch.ones(len(qzeros), 8).half()} | more


def in_order(num_columns: int, num_groups: int) -> Array:
    return np.arange(num_columns) * num_groups // num_columns


class Case:
    """Random codes, zero points with several 0, and scales, two of them 0 and one negative; columns in order."""

    def __init__(
        self, shape: tuple[int, int, int] = (16, 64, 32), bits: int = 4, dtype: Any = torch.float16
    ) -> None:
        num_rows, num_columns, size = shape
        num_groups = 1 if size == -1 else num_columns // size
        rng = np.random.default_rng(num_rows + bits)
        self.bits, self.groups = bits, in_order(num_columns, num_groups)
        self.q = rng.integers(0, 1 << bits, (num_rows, num_columns))
        self.zeros = rng.integers(0, 1 << bits, (num_groups, num_rows))
        self.zeros[0, ::3] = 0
        self.scales = torch.from_numpy(rng.uniform(0.001, 0.1, self.zeros.shape)).to(dtype)
        self.scales[0, :2] = 0
        self.scales[-1, -1] *= -1

    def awq(self) -> dict[str, Tensor]:
        return self._tensors(pack_awq_tensors(self.q, self.zeros))

    def gptq(self, form: ZeroForm = "same", has_index: bool = False) -> dict[str, Tensor]:
        tensors = self._tensors(pack_gptq_tensors(self.q, self.zeros, self.bits, form))
        return tensors | ({"g_idx": torch.from_numpy(self.groups.astype(np.int32))} if has_index else {})

    def _tensors(self, packed: dict[str, Any]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(value) for name, value in packed.items()} | {"scales": self.scales}

    def check(self, found: Tensor, atol: float = 0.0) -> None:
        exact = exact_weight(self.q, self.zeros, self.scales.double().numpy(), self.groups)
        torch.testing.assert_close(found.double(), torch.from_numpy(exact), rtol=0, atol=atol)


def check_stored(scheme: Scheme, tensors: dict[str, Tensor], shape: tuple[int, int, int]) -> None:
    stored = scheme.stored(*shape[:2])
    assert {name for name, one in stored.items() if not one.is_optional} <= set(tensors)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        name: stored[name].shape for name in tensors
    }


@pytest.mark.parametrize(
    ("scheme", "tensors", "zeros"),
    [
        (AwqScheme(4), literal(words(GOLDEN_AWQ, 8), words(GOLDEN_AWQ_ZEROS, 2)), [ROWS, 15 - ROWS]),
        *(
            (GptqScheme(4, 8, form), literal(words(GOLDEN, 1), words(GOLDEN_ZEROS[form], 1)), [ROWS, ROWS])
            for form in FORMS
        ),
    ],
    ids=["awq", *FORMS],
)
def test_literal_bytes_become_the_codes_and_zero_points_written_by_hand(
    scheme: Scheme, tensors: dict[str, Tensor], zeros: list[Tensor]
) -> None:
    weight = scheme.build(NAME, tensors)
    assert weight.codes.numpy().tobytes() == bytes.fromhex(GOLDEN)
    zero = torch.where(COLUMNS < 4, *zeros)
    assert torch.equal(weight.dequantize(), (ROWS + COLUMNS - zero).float())  # type: ignore[operator]


def test_literal_bytes_of_8_bits_become_signed_codes() -> None:
    tensors = literal(words(GOLDEN_INT8, 2), words(GOLDEN_INT8_ZEROS, 1))
    weight = GptqScheme(8, -1, "less_one").build(NAME, tensors)
    assert torch.equal(weight.codes.int(), 32 * ROWS + 3 * COLUMNS - 128)
    zeros = torch.tensor(INT8_ZEROS).view(-1, 1)
    assert torch.equal(weight.dequantize(), (32 * ROWS + 3 * COLUMNS - zeros).float())


def test_literal_bytes_in_another_order_of_columns_are_grouped_stably() -> None:
    index = torch.tensor([1, 0, 1, 0, 1, 0, 1, 0], dtype=torch.int32)
    tensors = literal(words(GOLDEN, 1), words("88888888 88888888", 2), g_idx=index)
    tensors["scales"][1] = 2.0
    weight = GptqScheme(4, 4, "same", has_order=True).build(NAME, tensors)
    assert weight.columns is not None and weight.columns.tolist() == [1, 3, 5, 7, 0, 2, 4, 6]
    assert weight.codes[0].numpy().tobytes() == bytes.fromhex("31752064")
    assert weight.dequantize()[0].tolist() == [-16, -7, -12, -5, -8, -3, -4, -1]


def test_the_packers_write_the_literal_bytes() -> None:
    def check(packed: dict[str, Any], qweight: str, qzeros: str) -> None:
        assert packed["qweight"].tobytes() == bytes.fromhex(qweight)
        assert packed["qzeros"].tobytes() == bytes.fromhex(qzeros)

    row = np.arange(8)
    q = np.add.outer(row, row)
    check(pack_awq_tensors(q, np.stack([row, 15 - row])), GOLDEN_AWQ, GOLDEN_AWQ_ZEROS)
    for form in FORMS:
        check(pack_gptq_tensors(q, row[None], 4, form), GOLDEN, GOLDEN_ZEROS[form])
    packed = pack_gptq_tensors(np.add.outer(32 * row, 3 * row), np.array([INT8_ZEROS]), 8, "less_one")
    check(packed, GOLDEN_INT8, GOLDEN_INT8_ZEROS)
    assert pack_gptq_lines(row[None], 8).tobytes() == bytes(range(8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_awq_weight_is_code_less_zero_point_times_scale(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    case = Case(shape, dtype=dtype)
    scheme = AwqScheme(shape[2])
    check_stored(scheme, case.awq(), shape)
    # float32: code * scale and zero point * scale round, once each
    case.check(
        scheme.build(NAME, case.awq()).dequantize(), 0.1 * 15 * 2**-23 if dtype == torch.float32 else 0
    )


@pytest.mark.parametrize("order", ["no g_idx", "in order", "act order"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gptq_weight_is_code_less_zero_point_times_scale(
    shape: tuple[int, int, int], bits: int, form: ZeroForm, order: str
) -> None:
    case = Case(shape, bits)
    if order == "act order":
        case.groups = np.random.default_rng(5).permutation(case.groups)
    tensors = case.gptq(form, order != "no g_idx")
    scheme = GptqScheme(bits, shape[2], form, has_order=order == "act order")
    check_stored(scheme, tensors, shape)
    weight = scheme.build(NAME, tensors)
    assert (weight.columns is not None) == (order == "act order" and len(case.zeros) > 1)
    case.check(weight.dequantize())


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 0.0), (torch.float32, 2.0**-19)])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_scales_of_other_types_are_read(bits: int, dtype: torch.dtype, rtol: float) -> None:
    case = Case(bits=bits, dtype=dtype)
    weight = GptqScheme(bits, 32).build(NAME, case.gptq("less_one"))
    case.check(weight.dequantize(), rtol * 2**bits * 0.1 * 2**-4)


@pytest.mark.parametrize("symmetric", [True, None])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", [*FORMS, "awq"])
def test_zero_points_in_the_middle_need_no_offsets(form: Any, bits: int, symmetric: bool | None) -> None:
    case = Case(bits=4 if form == "awq" else bits)
    case.zeros[:] = 1 << (case.bits - 1)
    if form == "awq":
        weight = AwqScheme(32).build(NAME, case.awq())
    else:
        weight = GptqScheme(bits, 32, form, symmetric).build(NAME, case.gptq(form))
    assert weight.offsets is None and weight.scales.dtype == torch.float16
    assert weight.bits_per_weight == case.bits + 16 / 32
    case.check(weight.dequantize())


def test_one_other_zero_point_brings_offsets() -> None:
    case = Case()
    case.zeros[:] = 8
    case.zeros[1, 3] = 9
    weight = AwqScheme(32).build(NAME, case.awq())
    assert weight.offsets is not None
    case.check(weight.dequantize())


def test_scales_that_float16_can_not_hold_stay_float32() -> None:
    case = Case((8, 8, 8))
    case.zeros[:] = 8
    case.scales = torch.full((1, 8), 2.0**-30, dtype=torch.bfloat16)
    weight = AwqScheme(8).build(NAME, case.awq())
    assert weight.scales.dtype == torch.float32
    case.check(weight.dequantize())


@pytest.mark.parametrize("has_qzeros", [False, True])
def test_awq_without_zero_points_has_its_middle_at_8(has_qzeros: bool) -> None:
    case = Case()
    case.zeros[:] = 8
    tensors = {name: t for name, t in case.awq().items() if has_qzeros or name != "qzeros"}
    scheme = load_awq_scheme(PATH, {"bits": 4, "group_size": 32, "zero_point": False})
    assert scheme.stored(16, 64)["qzeros"].is_optional
    weight = scheme.build(NAME, tensors)
    assert weight.offsets is None
    case.check(weight.dequantize())


def test_symmetric_zero_points_stored_as_they_are_under_the_old_name_are_still_8() -> None:
    case = Case()
    case.zeros[:] = 8
    raw = {"bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq"}
    weight = load_gptq_scheme(PATH, raw).build(NAME, case.gptq())
    assert weight.offsets is None
    case.check(weight.dequantize())


@pytest.mark.parametrize(
    ("scheme", "first", "other", "shown"),
    [
        (AwqScheme(32, has_zeros=False), 8, 5, "qzeros has zero point 5, "),
        (GptqScheme(4, 32, "less_one", True), 7, 6, "qzeros holds 6, "),
        (GptqScheme(4, 32, "less_one", True), 0, 0, "qzeros holds 0, "),
        (GptqScheme(4, 32, "same", True), 7, 7, "qzeros holds 7, "),
        (GptqScheme(4, 32, "same", True), 8, 3, "qzeros holds 3, "),
        (GptqScheme(4, 32, "less_one", True), 8, 7, "qzeros holds 7, "),
    ],
)
def test_zero_points_that_contradict_the_configuration_are_refused(
    scheme: Scheme, first: int, other: int, shown: str
) -> None:
    case = Case()
    case.zeros[:] = first
    case.zeros[1, 5] = other
    with pytest.raises(ModelRefused, match=f"^tensor {NAME}.{shown}"):
        scheme.build(NAME, case.awq() if isinstance(scheme, AwqScheme) else case.gptq())


def test_an_index_of_zeros_means_columns_in_order_only_without_act_order() -> None:
    case = Case()
    tensors = case.gptq() | {"g_idx": torch.zeros(64, dtype=torch.int32)}
    weight = GptqScheme(4, 32, "same").build(NAME, tensors)
    assert weight.columns is None
    case.check(weight.dequantize())
    with pytest.raises(ModelRefused, match=f"^tensor {NAME}.g_idx puts 64 columns in group 0, not 32; "):
        GptqScheme(4, 32, "same", has_order=True).build(NAME, tensors)


@pytest.mark.parametrize(
    ("column", "group", "dtype", "said"),
    [
        (3, 1, torch.int32, "puts 31 columns in group 0, not 32; "),
        (3, 2, torch.int32, "names group 2, but there are 2; "),
        (63, -1, torch.int32, "names group -1, but there are 2; "),
        (0, 0, torch.float32, "holds torch.float32, not int32; "),
    ],
)
def test_an_index_that_makes_no_equal_groups_is_refused(
    column: int, group: int, dtype: torch.dtype, said: str
) -> None:
    case = Case()
    case.groups[column] = group
    tensors = case.gptq(has_index=True)
    tensors["g_idx"] = tensors["g_idx"].to(dtype)
    with pytest.raises(ModelRefused, match=f"^tensor {NAME}.g_idx {said}"):
        GptqScheme(4, 32).build(NAME, tensors)


def test_the_stored_tensors_are_named_with_their_shapes() -> None:
    assert AwqScheme(128).stored(64, 256) == {
        "qweight": Stored((256, 8), ("I32",)),
        "qzeros": Stored((2, 8), ("I32",)),
        "scales": Stored((2, 64), FLOAT_TYPES),
    }
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


@pytest.mark.parametrize("scheme", [AwqScheme(128), GptqScheme(4, 128)])
def test_a_matrix_that_the_format_can_not_hold_is_refused(scheme: Scheme) -> None:
    with pytest.raises(ValueError, match="group size 128 does not divide its 576 columns; "):
        scheme.stored(64, 576)
    with pytest.raises(ValueError, match=r"packs 8 rows .*\[12, 256\]"):
        scheme.stored(12, 256)


G128 = {"bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("load", "raw", "scheme", "label"),
    [
        (load_awq_scheme, {}, AwqScheme(128), "awq int4 g128"),
        (load_awq_scheme, G128 | {"version": "gemm", "zero_point": True}, AwqScheme(128), "awq int4 g128"),
        (load_awq_scheme, {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}, AwqScheme(32), "awq int4 g32"),
        (load_awq_scheme, {"group_size": -1, "zero_point": False}, AwqScheme(-1, False), "awq int4 per row"),
        (
            load_awq_scheme,
            G128 | {"checkpoint_format": "gemm", "pack_dtype": "int32"},
            AwqScheme(128),
            "awq int4 g128",
        ),
        *(
            (load_gptq_scheme, G128 | raw, scheme, f"gptq int{scheme.bits} {label}")  # type: ignore[operator]
            for raw, scheme, label in [
                ({}, GptqScheme(4, 128), "g128"),
                ({"sym": True, "desc_act": False}, GptqScheme(4, 128, is_symmetric=True), "g128"),
                (
                    {"sym": False, "desc_act": True},
                    GptqScheme(4, 128, "less_one", False, True),
                    "g128 act-order",
                ),
                ({"desc_act": True, "static_groups": True}, GptqScheme(4, 128), "g128"),
                ({"desc_act": True, "group_size": -1}, GptqScheme(4, -1), "per row"),
                ({"bits": 8, "checkpoint_format": "gptq_v2"}, GptqScheme(8, 128, "same"), "g128"),
                ({"format": "gptq_v2"}, GptqScheme(4, 128, "same"), "g128"),
                ({"meta": {"quantizer": ["gptqmodel:5.0.0"]}}, GptqScheme(4, 128, "words_less_one"), "g128"),
                ({"meta": {"quantizer": "gptqmodel:1.4.2"}}, GptqScheme(4, 128, "words_less_one"), "g128"),
                ({"meta": {"quantizer": ["intel/auto-round:0.2"]}}, GptqScheme(4, 128), "g128"),
                ({"dynamic": None, "lm_head": True, "damp_percent": 0.1}, GptqScheme(4, 128), "g128"),
            ]
        ),
    ],
)
def test_configurations_are_read(
    load: Callable[..., Scheme], raw: dict[str, Any], scheme: Scheme, label: str
) -> None:
    found = load(PATH, {"modules_to_not_convert": None} | raw)
    assert (found, found.label) == (scheme, label)


@pytest.mark.parametrize(
    ("load", "key", "value"),
    [
        *((load_awq_scheme, "bits", value) for value in (8, 3, "4")),
        *((load_awq_scheme, "group_size", value) for value in (0, True, "128")),
        *((load_awq_scheme, "version", value) for value in ("gemv", "marlin", "exllama")),
        (load_awq_scheme, "checkpoint_format", "gemv_fast"),
        (load_awq_scheme, "backend", "llm-awq"),
        (load_awq_scheme, "zero_point", "yes"),
        (load_awq_scheme, "pack_dtype", "int16"),
        (load_awq_scheme, "lm_head", True),
        (load_awq_scheme, "dynamic", {"-:x": {}}),
        *((load_gptq_scheme, "bits", value) for value in (3, None)),
        *((load_gptq_scheme, "group_size", value) for value in (-2, None)),
        (load_gptq_scheme, "checkpoint_format", "marlin"),
        (load_gptq_scheme, "format", "bitblas"),
        (load_gptq_scheme, "is_marlin_format", True),
        (load_gptq_scheme, "sym", "yes"),
        (load_gptq_scheme, "desc_act", "no"),
        (load_gptq_scheme, "static_groups", "no"),
        (load_gptq_scheme, "pack_dtype", "int64"),
        (load_gptq_scheme, "adapter", {"name": "lora"}),
        (load_gptq_scheme, "rotation", "hadamard"),
        (load_gptq_scheme, "dynamic", {"+:.*down.*": {"bits": 8}}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(load: Callable[..., Scheme], key: str, value: Any) -> None:
    with pytest.raises(ModelRefused) as caught:
        load(PATH, G128 | {key: value})
    assert str(caught.value).startswith(f"{PATH}: quantization_config.{key} is {value!r}, ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "key", "value"), [("w_bit", "bits", 3), ("q_group_size", "group_size", "128")]
)
def test_awqs_own_names_of_keys_are_refused_under_the_common_ones(old: str, key: str, value: Any) -> None:
    with pytest.raises(ModelRefused, match=rf"quantization_config\.{key} is {value!r}, "):
        load_awq_scheme(PATH, {old: value})


@pytest.mark.parametrize("has_zeros", [True, False])
def test_the_compressed_tensors_package_converts_awq_to_the_same_weight(has_zeros: bool) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    case = Case((32, 128, 32))
    if not has_zeros:
        case.zeros[:] = 8
    converter = AutoAWQConverter(group_size=32, zero_point=has_zeros)
    theirs = converter.process({f"{NAME}.{name}": tensor for name, tensor in case.awq().items()})
    codes = unpack_from_int32(theirs[f"{NAME}.weight_packed"], 4, torch.Size((32, 128))).double()
    codes = codes.unflatten(1, (4, 32))
    if has_zeros:
        points = unpack_from_int32(theirs[f"{NAME}.weight_zero_point"], 4, torch.Size((32, 4)), packed_dim=0)
        codes = codes - points.double().unsqueeze(2)
    expected = (codes * theirs[f"{NAME}.weight_scale"].double().unsqueeze(2)).flatten(1)
    assert torch.equal(AwqScheme(32, has_zeros).build(NAME, case.awq()).dequantize().double(), expected)
