"""Dequantization of every GGUF type against the `gguf` package and against blocks worked out by hand."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from gristmill.engine.checkpoint.gguf_quants import (
    BLOCK_SHAPES,
    CODE_SHAPES,
    dequantize,
    row_bytes,
    split_blocks,
)
from tests.engine.gguf_blocks import GOLDEN, random_blocks

QUANTIZABLE = [name for name, (size, _) in BLOCK_SHAPES.items() if size < 256]  # by the package


def _assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), expected.reshape(-1).view(np.uint32))


def test_block_shapes_are_those_of_the_package() -> None:
    for name, shape in BLOCK_SHAPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == shape
        assert row_bytes(name, 512) == 512 // shape[0] * shape[1]


@pytest.mark.parametrize("type_name", QUANTIZABLE)
def test_dequantization_equals_the_reference_bit_for_bit(type_name: str) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    data = np.random.default_rng(1).normal(size=(7, 96)).astype(np.float32)
    raw = gguf.quantize(data, kind)
    found = dequantize(np.ascontiguousarray(raw).view(np.uint8), type_name)
    _assert_same_bits(found, gguf.dequantize(raw, kind))


@pytest.mark.parametrize("type_name", CODE_SHAPES)
def test_every_byte_pattern_of_a_block_dequantizes_as_the_reference(type_name: str) -> None:
    raw = random_blocks(type_name, 20, 25)
    _assert_same_bits(dequantize(raw, type_name), gguf.dequantize(raw, gguf.GGMLQuantizationType[type_name]))


@pytest.mark.parametrize("type_name", CODE_SHAPES)
def test_a_block_of_literal_bytes_has_the_weights_worked_out_by_hand(type_name: str) -> None:
    block, weights = GOLDEN[type_name]
    assert len(block) == BLOCK_SHAPES[type_name][1]
    assert dequantize(np.frombuffer(block, np.uint8), type_name).tolist() == weights


@pytest.mark.parametrize("type_name", CODE_SHAPES)
def test_a_block_comes_apart_as_its_code_shape_says(type_name: str) -> None:
    shape, (block_elements, _) = CODE_SHAPES[type_name], BLOCK_SHAPES[type_name]
    codes, scales, offsets = split_blocks(random_blocks(type_name, 3, 2), type_name)
    assert codes.shape == (6, block_elements)
    assert codes.dtype == (np.uint8 if shape.kind == "int4" else np.int8)
    assert scales.shape == (6, block_elements // shape.group_size)
    assert scales.itemsize == shape.scale_bytes
    assert (offsets is not None) == shape.has_offsets
    if shape.kind == "int4":
        assert codes.max() == 15
