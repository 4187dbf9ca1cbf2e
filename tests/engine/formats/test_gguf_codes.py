"""GGUF matrices in codes: the same numbers as the `gguf` package's, in the bits that the file's own codes take."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import gristmill.engine.checkpoint.gguf_codes
from gristmill.engine.checkpoint.gguf import load_gguf, tensor_bytes
from gristmill.engine.checkpoint.gguf_codes import (
    can_keep_codes,
    iterate_rows,
    load_codes,
    row_order,
    to_codes,
)
from gristmill.engine.checkpoint.gguf_quants import BLOCK_SHAPES, CODE_SHAPES
from gristmill.engine.checkpoint.opening import load_checkpoint
from gristmill.engine.checkpoint.tensor_sources import TensorSource
from gristmill.engine.errors import ModelRefused
from tests.engine.gguf_blocks import GOLDEN, random_blocks

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _reference(raw: np.ndarray, type_name: str) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[type_name]))


def _write(
    path: Path, raw: np.ndarray, type_name: str, rotary_heads: int = 0, start: int = 7
) -> TensorSource:
    path.write_bytes(b"x" * start + raw.tobytes() + b"y")
    block_elements, block_bytes = BLOCK_SHAPES[type_name]
    shape = (len(raw), raw.shape[1] // block_bytes * block_elements)
    return TensorSource(str(path), start, raw.size, shape, type_name, rotary_heads)


@pytest.mark.parametrize("type_name", CODE_SHAPES)
@pytest.mark.parametrize(("num_rows", "num_blocks"), [(1, 1), (5, 3), (33, 2)])
def test_codes_dequantize_to_the_reference_exactly(type_name: str, num_rows: int, num_blocks: int) -> None:
    raw = random_blocks(type_name, num_rows, num_blocks)
    found, shape = to_codes(raw, type_name), CODE_SHAPES[type_name]
    assert (found.kind, found.group_size) == (shape.kind, shape.group_size)
    assert found.scales.element_size() == shape.scale_bytes
    assert found.bits_per_weight == shape.bits_per_weight
    assert torch.equal(found.dequantize(), _reference(raw, type_name))


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_package_quantized_stays_as_it_is(type_name: str) -> None:
    data = np.random.default_rng(1).normal(size=(9, 96)).astype(np.float32)
    raw = gguf.quantize(data, gguf.GGMLQuantizationType[type_name])
    assert torch.equal(to_codes(raw, type_name).dequantize(), _reference(raw, type_name))


def test_bits_per_weight_are_those_of_the_file_where_scales_stay_float16() -> None:
    bits = {name: shape.bits_per_weight for name, shape in CODE_SHAPES.items()}
    file_bits = {name: 8 * BLOCK_SHAPES[name][1] / BLOCK_SHAPES[name][0] for name in CODE_SHAPES}
    assert {name: bits[name] for name in ("Q4_0", "Q4_1", "Q8_0")} == {"Q4_0": 4.5, "Q4_1": 5.0, "Q8_0": 8.5}
    assert all(bits[name] == file_bits[name] for name in ("Q4_0", "Q4_1", "Q8_0"))
    # Products of a scale and an integer need float32; five and six bits become a byte.
    assert (bits["Q4_K"], bits["Q5_K"], bits["Q6_K"]) == (6.0, 10.0, 10.0)


def test_literal_blocks_give_literal_codes_scales_and_offsets() -> None:
    q4_0 = to_codes(_block("Q4_0"), "Q4_0")
    assert q4_0.codes.numpy().tobytes().hex() == "1032547698badcfeefcdab8967452301"
    assert (q4_0.scales.tolist(), q4_0.offsets) == ([[0.5]], None)
    q4_1 = to_codes(_block("Q4_1"), "Q4_1")
    assert q4_1.codes.numpy().tobytes().hex() == "1032547698badcfeefcdab8967452301"
    assert q4_1.offsets is not None
    assert (q4_1.scales.tolist(), q4_1.offsets.tolist()) == ([[0.5]], [[-1.0]])
    q8_0 = to_codes(_block("Q8_0"), "Q8_0")
    assert (q8_0.codes.tolist(), q8_0.scales.tolist()) == ([list(range(-16, 16))], [[0.25]])
    q4_k = to_codes(_block("Q4_K"), "Q4_K")
    groups = ["11", "22", "33", "44", "55", "66", "00", "ff"]
    assert q4_k.codes.numpy().tobytes().hex() == "".join(byte * 16 for byte in groups)
    assert q4_k.scales.flatten().tolist() == [1, 2, 3, 63, 20, 33, 62, 5]
    assert q4_k.offsets is not None
    assert q4_k.offsets.flatten().tolist() == [0, -2, -20, -31.5, -1, -8.5, -17.5, -24]
    q6_k = to_codes(_block("Q6_K"), "Q6_K")
    assert q6_k.codes[0, ::32].tolist() == [-31, -15, 2, 18, 16, 0, -1, -17]
    assert q6_k.scales[:, 0].tolist() == [
        0.5, 1, -0.5, -1, 1.5, 2, -1.5, -2, 2.5, 3, -2.5, -3, 63.5, -64, 3.5, 4,
    ]  # fmt: skip


@pytest.mark.parametrize("type_name", ["Q4_1", "Q6_K"])
@pytest.mark.parametrize("slice_weights", [1, 3 * 512, 1 << 20])
def test_a_matrix_is_read_from_its_place_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_name: str, slice_weights: int
) -> None:
    monkeypatch.setattr(gristmill.engine.checkpoint.gguf_codes, "MAX_SLICE_WEIGHTS", slice_weights)
    raw = random_blocks(type_name, 10, 512 // BLOCK_SHAPES[type_name][0])
    found = load_codes(_write(tmp_path / "a", raw, type_name))
    assert torch.equal(found.dequantize(), _reference(raw, type_name))


@pytest.mark.parametrize("slice_weights", [5 * 64, 1 << 20])
def test_interleaved_rows_come_in_the_order_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_weights: int
) -> None:
    monkeypatch.setattr(gristmill.engine.checkpoint.gguf_codes, "MAX_SLICE_WEIGHTS", slice_weights)
    raw = random_blocks("Q4_1", 3 * 8, 2)
    found = load_codes(_write(tmp_path / "a", raw, "Q4_1", rotary_heads=3)).dequantize()
    for head in range(3):
        rows = _reference(raw, "Q4_1")[8 * head : 8 * head + 8]
        assert torch.equal(found[8 * head : 8 * head + 4], rows[0::2])
        assert torch.equal(found[8 * head + 4 : 8 * head + 8], rows[1::2])


def test_row_order_of_one_head_takes_even_rows_first() -> None:
    assert row_order(8, 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert row_order(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_rows_of_vectors_are_their_numbers_and_a_vector_in_blocks_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(np.arange(6, dtype="<f4").tobytes())
    ((start, rows),) = iterate_rows(TensorSource(str(path), 0, 24, (6,), "F32", rotary_heads=1))
    assert (start, rows.view("<f4").flatten().tolist()) == (0, [0, 2, 4, 1, 3, 5])
    path.write_bytes(random_blocks("Q8_0", 1, 3).tobytes())
    ((start, rows),) = iterate_rows(TensorSource(str(path), 0, 102, (96,), "Q8_0"))
    assert (start, rows.shape) == (0, (1, 102))


def test_reading_takes_little_memory_beyond_the_result(tmp_path: Path) -> None:
    source = _write(tmp_path / "a", random_blocks("Q4_1", 4096, 64), "Q4_1")
    load_codes(source)  # what is imported or cached on first use is no part of it
    tracemalloc.start()
    num_bytes = load_codes(source).num_bytes
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_bytes == 4096 * 2048 * 5 // 8
    assert peak_bytes < num_bytes + (6 << 20), "dequantized it would be 32 MiB"


def test_only_matrices_of_quantized_types_keep_their_codes(tmp_path: Path) -> None:
    assert can_keep_codes(_write(tmp_path / "a", random_blocks("Q8_0", 2, 1), "Q8_0"))
    assert not can_keep_codes(TensorSource("a", 0, 34, (32,), "Q8_0"))
    assert not can_keep_codes(TensorSource("a", 0, 64, (2, 16), "BF16"))


@pytest.mark.parametrize(("type_name", "high_byte"), [("Q4_0", 1), ("Q4_1", 3), ("Q4_K", 3), ("Q6_K", 209)])
@pytest.mark.parametrize("bits", [0x7C, 0x7E])
def test_a_scale_that_is_no_finite_number_is_refused_by_the_tensors_name(
    tmp_path: Path, type_name: str, high_byte: int, bits: int
) -> None:
    raw = np.tile(np.frombuffer(GOLDEN[type_name][0], np.uint8), (4, 2))
    raw[2, high_byte], raw[2, high_byte - 1] = bits, 0  # infinity, or no number
    source = _write(tmp_path / "a", raw, type_name)
    with pytest.raises(ModelRefused, match="k_proj.*not finite.*get it again"):
        load_codes(source, "model.layers.0.self_attn.k_proj.weight")


@pytest.mark.parametrize(("type_id", "type_name"), [(12, "Q4_K"), (13, "Q5_K"), (14, "Q6_K")])
def test_a_row_that_is_no_multiple_of_256_is_refused_by_the_reader(
    tmp_path: Path, type_id: int, type_name: str
) -> None:
    name = b"blk.0.attn_q.weight"
    entry = struct.pack("<Q19sIQQIQ", len(name), name, 2, 576, 4, type_id, 0)
    path = tmp_path / "a.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + entry + bytes(4096))
    with pytest.raises(ModelRefused, match=rf"attn_q.*\[4, 576\].*{type_name} is a positive multiple of 256"):
        load_gguf(str(path))


def test_smollm2_has_five_bits_in_its_linears_and_eight_and_a_half_in_its_tied_head(
    smollm2_path: str,
) -> None:
    tensors = load_checkpoint(smollm2_path).tensors
    for layer in (0, 29):
        for part in LINEARS:
            name = f"model.layers.{layer}.{'mlp' if part in LINEARS[4:] else 'self_attn'}.{part}.weight"
            source = tensors[name]
            assert isinstance(source, TensorSource)
            found = load_codes(source, name)
            assert (found.kind, found.group_size, found.bits_per_weight) == ("int4", 32, 5.0), name
            assert found.shape == source.shape
    source = tensors["model.embed_tokens.weight"]
    assert isinstance(source, TensorSource)
    head = load_codes(source)
    assert (head.kind, head.group_size, head.bits_per_weight) == ("int8", 32, 8.5)
    rows = torch.tensor([0, 1, 17, 1821, 49151])
    raw = tensor_bytes(load_gguf(smollm2_path), "token_embd.weight").reshape(49152, -1)[rows.numpy()]
    assert torch.equal(head.take_rows(rows).dequantize(), _reference(raw, "Q8_0"))


@pytest.mark.parametrize(
    ("name", "gguf_name", "num_heads"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", 9),
        ("model.layers.29.self_attn.k_proj.weight", "blk.29.attn_k.weight", 3),
        ("model.layers.15.mlp.down_proj.weight", "blk.15.ffn_down.weight", 0),
    ],
)
def test_smollm2s_codes_dequantize_as_the_package_does(
    smollm2_path: str, name: str, gguf_name: str, num_heads: int
) -> None:
    source = load_checkpoint(smollm2_path).tensors[name]
    assert isinstance(source, TensorSource)
    raw = tensor_bytes(load_gguf(smollm2_path), gguf_name).reshape(source.shape[0], -1)
    expected = _reference(raw, source.type)
    if num_heads:
        expected = expected.view(num_heads, 32, 2, -1).transpose(1, 2).reshape(expected.shape)
    assert torch.equal(load_codes(source, name).dequantize(), expected)


def _block(type_name: str) -> np.ndarray:
    return np.frombuffer(GOLDEN[type_name][0], np.uint8).reshape(1, -1)
