"""AWQ's gemm packing: literal bytes, every variant against float64, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.engine.checkpoint.formats.awq import AwqScheme, load_awq_scheme
from gristmill.engine.checkpoint.formats.scheme import FLOAT_TYPES, Stored
from gristmill.engine.errors import ModelRefused
from tests.engine.formats.packers_int4 import exact_weight, pack_awq_tensors

NAME = "model.layers.0.mlp.up_proj"
PATH = "/models/m/config.json"

# The codes of row n and column k are n + k. Column 0 has rows 0 2 4 6 1 3 5 7 from its low bits up: 0x75316420.
GOLDEN_QWEIGHT = "20643175 31754286 42865397 539764a8".split()
GOLDEN_QWEIGHT += "64a875b9 75b986ca 86ca97db 97dba8ec".split()
# Two groups of four columns: zero points 0 1 2 3 4 5 6 7, then 15 14 13 12 11 10 9 8.
GOLDEN_QZEROS = "20643175 df9bce8a".split()
GOLDEN_CODES = "10325476 21436587 32547698 436587a9 547698ba 6587a9cb 7698badc 87a9cbed"


def words(lines: list[str]) -> Tensor:
    """One word a line, its bytes in the order of the file."""
    return torch.from_numpy(np.frombuffer(bytes.fromhex("".join(lines)), "<i4").copy()).view(-1, 1)


def random_case(
    num_rows: int, num_columns: int, num_groups: int, dtype: torch.dtype, seed: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64], Tensor]:
    """Codes, zero points and scales, two of them 0 and one negative."""
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 16, (num_rows, num_columns))
    zeros = rng.integers(0, 16, (num_groups, num_rows))
    scales = torch.from_numpy(rng.uniform(0.001, 0.1, (num_groups, num_rows))).to(dtype)
    scales[0, :2] = 0
    scales[-1, -1] *= -1
    return q, zeros, scales


def tensors_of(q: NDArray[np.int64], zeros: NDArray[np.int64], scales: Tensor) -> dict[str, Tensor]:
    packed = {name: torch.from_numpy(value) for name, value in pack_awq_tensors(q, zeros).items()}
    return packed | {"scales": scales}


def expected_weight(q: NDArray[np.int64], zeros: NDArray[np.int64], scales: Tensor) -> Tensor:
    groups = np.arange(q.shape[1]) // (q.shape[1] // len(zeros))
    return torch.from_numpy(exact_weight(q, zeros, scales.double().numpy(), groups))


def test_literal_bytes_become_the_codes_and_zero_points_written_by_hand() -> None:
    scales = torch.ones(2, 8, dtype=torch.float16)
    tensors = {"qweight": words(GOLDEN_QWEIGHT), "qzeros": words(GOLDEN_QZEROS), "scales": scales}
    weight = AwqScheme(4).build(NAME, tensors)
    assert weight.codes.numpy().tobytes() == bytes.fromhex(GOLDEN_CODES)
    rows, columns = torch.arange(8).view(-1, 1), torch.arange(8)
    zeros = torch.where(columns < 4, rows, 15 - rows)
    assert torch.equal(weight.dequantize(), (rows + columns - zeros).float())


def test_the_packer_writes_the_literal_bytes() -> None:
    q = np.add.outer(np.arange(8), np.arange(8))
    packed = pack_awq_tensors(q, np.stack([np.arange(8), 15 - np.arange(8)]))
    assert packed["qweight"].tobytes() == bytes.fromhex("".join(GOLDEN_QWEIGHT))
    assert packed["qzeros"].tobytes() == bytes.fromhex("".join(GOLDEN_QZEROS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "group_size"), [(8, 8, 4), (24, 96, 32), (16, 128, 128), (40, 64, -1)]
)
def test_a_weight_is_code_less_zero_point_times_scale(
    num_rows: int, num_columns: int, group_size: int, dtype: torch.dtype
) -> None:
    num_groups = 1 if group_size == -1 else num_columns // group_size
    q, zeros, scales = random_case(num_rows, num_columns, num_groups, dtype)
    scheme = AwqScheme(group_size)
    tensors = tensors_of(q, zeros, scales)
    stored = scheme.stored(num_rows, num_columns)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: entry.shape for name, entry in stored.items()
    }
    weight = scheme.build(NAME, tensors)
    expected = expected_weight(q, zeros, scales)
    if dtype == torch.float32:  # code * scale and zero point * scale round, once each
        torch.testing.assert_close(weight.dequantize().double(), expected, rtol=0, atol=0.1 * 15 * 2**-23)
    else:
        assert torch.equal(weight.dequantize().double(), expected)


def test_zero_points_of_8_everywhere_need_no_offsets_and_scales_stay_float16() -> None:
    q, zeros, scales = random_case(16, 64, 2, torch.float16)
    weight = AwqScheme(32).build(NAME, tensors_of(q, np.full_like(zeros, 8), scales))
    assert weight.offsets is None
    assert weight.scales.dtype == torch.float16
    assert weight.bits_per_weight == 4 + 16 / 32


def test_one_other_zero_point_brings_offsets() -> None:
    q, zeros, scales = random_case(16, 64, 2, torch.float16)
    zeros = np.full_like(zeros, 8)
    zeros[1, 3] = 9
    weight = AwqScheme(32).build(NAME, tensors_of(q, zeros, scales))
    assert weight.offsets is not None
    assert torch.equal(weight.dequantize().double(), expected_weight(q, zeros, scales))


def test_scales_that_float16_can_not_hold_stay_float32() -> None:
    q, zeros, _ = random_case(8, 8, 1, torch.float32)
    scales = torch.full((1, 8), 2.0**-30, dtype=torch.bfloat16)
    weight = AwqScheme(8).build(NAME, tensors_of(q, np.full_like(zeros, 8), scales))
    assert weight.scales.dtype == torch.float32
    assert torch.equal(weight.dequantize().double(), expected_weight(q, np.full_like(zeros, 8), scales))


@pytest.mark.parametrize("has_qzeros", [False, True])
def test_without_zero_points_the_middle_is_8(has_qzeros: bool) -> None:
    q, zeros, scales = random_case(16, 64, 2, torch.float16)
    zeros = np.full_like(zeros, 8)
    tensors = tensors_of(q, zeros, scales)
    if not has_qzeros:
        del tensors["qzeros"]
    scheme = load_awq_scheme(PATH, {"bits": 4, "group_size": 32, "zero_point": False})
    assert scheme.stored(16, 64)["qzeros"].is_optional
    weight = scheme.build(NAME, tensors)
    assert weight.offsets is None
    assert torch.equal(weight.dequantize().double(), expected_weight(q, zeros, scales))


def test_zero_points_that_contradict_the_configuration_are_refused() -> None:
    q, zeros, scales = random_case(16, 64, 2, torch.float16)
    zeros[:] = 8
    zeros[1, 2] = 5
    with pytest.raises(ModelRefused, match=f"^tensor {NAME}.qzeros has zero point 5, but zero_point false"):
        AwqScheme(32, has_zeros=False).build(NAME, tensors_of(q, zeros, scales))


def test_the_stored_tensors_are_named_with_their_shapes() -> None:
    assert AwqScheme(128).stored(64, 256) == {
        "qweight": Stored((256, 8), ("I32",)),
        "qzeros": Stored((2, 8), ("I32",)),
        "scales": Stored((2, 64), FLOAT_TYPES),
    }


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "message"),
    [
        (64, 576, "group size 128 does not divide its 576 columns; "),
        (12, 256, r"awq packs 8 rows and 2 columns together, which \[12, 256\] can't be cut into; "),
    ],
)
def test_a_matrix_that_the_format_can_not_hold_is_refused(
    num_rows: int, num_columns: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AwqScheme(128).stored(num_rows, num_columns)


@pytest.mark.parametrize(
    ("raw", "scheme", "label"),
    [
        ({}, AwqScheme(128), "awq int4 g128"),
        ({"bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}, AwqScheme(64), "awq int4 g64"),
        ({"w_bit": 4, "q_group_size": 32, "version": "GEMM"}, AwqScheme(32), "awq int4 g32"),
        ({"bits": 4, "group_size": -1, "zero_point": False}, AwqScheme(-1, False), "awq int4 per row"),
        (
            {"bits": 4, "group_size": 16, "checkpoint_format": "gemm", "pack_dtype": "int32"},
            AwqScheme(16),
            "awq int4 g16",
        ),
    ],
)
def test_configurations_are_read(raw: dict[str, Any], scheme: AwqScheme, label: str) -> None:
    found = load_awq_scheme(PATH, {"quant_method": "awq", "modules_to_not_convert": None} | raw)
    assert (found, found.label) == (scheme, label)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"bits": 8}, "bits is 8, which is not supported; Gristmill reads 4; "),
        ({"w_bit": 3}, "bits is 3, "),
        ({"bits": "4"}, "bits is '4', "),
        ({"group_size": 0}, "group_size is 0, "),
        ({"group_size": True}, "group_size is True, "),
        ({"q_group_size": "128"}, "group_size is '128', "),
        ({"version": "gemv"}, "version is 'gemv', which is not supported; Gristmill reads gemm"),
        ({"version": "marlin"}, "version is 'marlin', "),
        ({"version": "exllama"}, "version is 'exllama', "),
        ({"checkpoint_format": "gemv_fast"}, "checkpoint_format is 'gemv_fast', "),
        ({"backend": "llm-awq"}, "backend is 'llm-awq', "),
        ({"zero_point": "yes"}, "zero_point is 'yes', "),
        ({"pack_dtype": "int16"}, "pack_dtype is 'int16', "),
        ({"lm_head": True}, "lm_head is True, "),
        ({"dynamic": {"-:x": {}}}, "dynamic is {'-:x': {}}, "),
    ],
)
def test_what_is_not_supported_is_refused_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelRefused) as caught:
        load_awq_scheme(PATH, raw)
    assert str(caught.value).startswith(f"{PATH}: quantization_config.{message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("has_zeros", [True, False])
def test_the_compressed_tensors_package_converts_to_the_same_weight(has_zeros: bool) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    q, zeros, scales = random_case(32, 128, 4, torch.float16, seed=1)
    if not has_zeros:
        zeros = np.full_like(zeros, 8)
    tensors = tensors_of(q, zeros, scales)
    converter = AutoAWQConverter(group_size=32, zero_point=has_zeros)
    theirs = converter.process({f"{NAME}.{name}": tensor for name, tensor in tensors.items()})
    codes = unpack_from_int32(theirs[f"{NAME}.weight_packed"], 4, torch.Size((32, 128))).double()
    codes = codes.unflatten(1, (4, 32))
    if has_zeros:
        points = unpack_from_int32(theirs[f"{NAME}.weight_zero_point"], 4, torch.Size((32, 4)), packed_dim=0)
        codes = codes - points.double().unsqueeze(2)
    expected = (codes * theirs[f"{NAME}.weight_scale"].double().unsqueeze(2)).flatten(1)
    assert torch.equal(AwqScheme(32, has_zeros).build(NAME, tensors).dequantize().double(), expected)
