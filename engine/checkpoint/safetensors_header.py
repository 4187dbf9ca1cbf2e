"""Headers of the safetensors files of a model folder: where each tensor lies.

The format's own parser reads and checks them against file sizes; pickled weights are never opened.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from gristmill.engine.errors import ModelRefused
from gristmill.engine.model_files import load_json_object, open_model_file

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# Bytes of an element; what a tensor may be of is decided by what it is.
_TYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """One tensor of one file; offset counts from the file's start."""

    file: str
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    type: str


def weight_files(folder: Path) -> list[Path]:
    """The model's safetensors files, sorted; raises ModelRefused when there are none or one is missing."""
    index = folder / INDEX_NAME
    if index.is_file():
        weight_map = load_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelRefused(f"{index}: no weight_map; download the index again")
        files = [folder / str(name) for name in sorted(set(weight_map.values()))]
        for file in files:
            if file.parent != folder or not file.is_file():
                raise ModelRefused(
                    f"{folder}: shard {file.name} is missing, which {INDEX_NAME} names; download it"
                )
        return files
    single = folder / "model.safetensors"
    found = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if found:
        return found
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"))
    if pickled:
        raise ModelRefused(
            f"{folder}: weights only as pickle ({pickled[0]}), which can run code when opened;"
            " convert them to safetensors"
        )
    raise ModelRefused(f"{folder}: no weights (.safetensors) in the folder; download them")


def load_headers(folder: Path) -> dict[str, SafetensorsEntry]:
    """Every tensor of the model by name."""
    entries: dict[str, SafetensorsEntry] = {}
    for file in weight_files(folder):
        for entry_name, entry in _file_entries(file):
            if entry_name in entries:
                raise ModelRefused(
                    f"{folder}: tensor {entry_name} is in two files, the second is {file.name};"
                    f" keep one set of weights or add {INDEX_NAME}"
                )
            entries[entry_name] = entry
    return entries


def read_header(file: Path) -> bytes:
    """The JSON header's bytes."""
    size = file.stat().st_size
    with open_model_file(file) as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ModelRefused(
                f"{file}: a header of {length} bytes in a file of {size}; it is truncated, download it again"
            )
        return stream.read(length)


def _file_entries(file: Path) -> Iterator[tuple[str, SafetensorsEntry]]:
    """The file's tensors in the order of their bytes, which the parser has found to follow each other gapless."""
    header = read_header(file)
    offset = 8 + len(header)
    try:
        with safe_open(str(file), framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
    except SafetensorError as error:
        raise ModelRefused(f"{file}: {_reason(file, header)} ({error}); download it again") from error
    for name, found in slices.items():
        kind, shape = str(found.get_dtype()), tuple(found.get_shape())
        if kind not in _TYPE_BYTES:
            raise ModelRefused(
                f"{file}: tensor {name} is {kind}, which is not supported; use weights in {', '.join(_TYPE_BYTES)}"
            )
        num_bytes = prod(shape) * _TYPE_BYTES[kind]
        yield name, SafetensorsEntry(str(file), offset, num_bytes, shape, kind)
        offset += num_bytes


def _reason(file: Path, header: bytes) -> str:
    """What is wrong with a file that the parser does not take."""
    try:
        json.loads(header)
    except ValueError:
        return "the safetensors header is not JSON"
    ends = re.findall(rb'"data_offsets":\s*\[\s*\d+\s*,\s*(\d+)\s*\]', header)
    end, size = 8 + len(header) + max(map(int, ends), default=0), file.stat().st_size
    if end > size:
        return f"truncated: its tensors end at byte {end} but the file has {size}"
    return "the safetensors header does not fit the file"
