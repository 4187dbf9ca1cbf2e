"""The GGUF reader against the `gguf` package, and against files that are cut short or lie."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from gristmill.engine.checkpoint.gguf import load_gguf, tensor_bytes
from gristmill.engine.errors import ModelRefused

HEADER = struct.Struct("<4sIQQ")


def _write(path: Path, type_name: str = "F32", **values: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("test.words", ["a", "đơn hàng", "😀"])
    writer.add_array("test.numbers", [1, -2, 3])
    writer.add_float32("test.ratio", 0.5)
    writer.add_bool("test.flag", True)
    for key, value in values.items():
        writer.add_string(key, value)
    data = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[type_name]
    writer.add_tensor("first.weight", gguf.quantize(data, kind), raw_dtype=kind)
    writer.add_tensor("second.weight", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_read_as_they_were_written(tmp_path: Path) -> None:
    file = load_gguf(str(_write(tmp_path / "a.gguf", "Q4_1")))
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["test.words"] == ["a", "đơn hàng", "😀"]
    assert file.metadata["test.numbers"] == [1, -2, 3]
    assert file.metadata["test.ratio"] == 0.5
    assert file.metadata["test.flag"] is True
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    for tensor in reader.tensors:
        entry = file.tensors[tensor.name]
        assert (entry.offset, entry.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        np.testing.assert_array_equal(tensor_bytes(file, tensor.name), tensor.data.view(np.uint8).reshape(-1))


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    whole = _write(tmp_path / "a.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, len(whole) - 32, 7), len(whole) - 33]:  # the last 32 bytes may be padding
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelRefused, match="truncated|too short|over the limit"):
            load_gguf(str(cut))


@pytest.mark.parametrize(
    ("position", "code", "value", "message"),
    [
        (4, "<I", 1, "version 1"),
        (4, ">I", 3, "version 50331648"),
        (8, "<Q", 1 << 60, "tensors is over the limit"),
        (16, "<Q", 1 << 60, "metadata keys is over the limit"),
        (24, "<Q", 1 << 60, "bytes in a string is over the limit"),
    ],
)
def test_an_absurd_header_is_refused(
    tmp_path: Path, position: int, code: str, value: int, message: str
) -> None:
    path = _write(tmp_path / "a.gguf")
    data = bytearray(path.read_bytes())
    struct.pack_into(code, data, position, value)
    path.write_bytes(data)
    with pytest.raises(ModelRefused, match=message):
        load_gguf(str(path))


def test_random_damage_to_the_header_is_refused_or_harmless(tmp_path: Path) -> None:
    whole = _write(tmp_path / "a.gguf").read_bytes()
    random = np.random.default_rng(3)
    path = tmp_path / "b.gguf"
    for _ in range(300):
        data = bytearray(whole)
        data[int(random.integers(4, 400))] = int(random.integers(256))
        path.write_bytes(data)
        try:
            load_gguf(str(path))
        except ModelRefused as error:
            assert "\n" not in str(error)


def test_arrays_nested_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    nested = struct.pack("<IQ", 9, 1) * 1000
    path.write_bytes(HEADER.pack(b"GGUF", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 9) + nested)
    with pytest.raises(ModelRefused, match="nested"):
        load_gguf(str(path))


def test_an_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    kind = gguf.GGMLQuantizationType.Q3_K
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((2, 110), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelRefused, match=r"blk\.0\.attn_q\.weight is Q3_K.*Q4_1"):
        load_gguf(str(tmp_path / "a.gguf"))
