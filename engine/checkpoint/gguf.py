"""Reader of GGUF files: header, metadata, tensor table and the raw bytes of one tensor, memory-mapped.

Everything a header claims is checked against the file's size before it is believed, so a truncated or hostile
file is refused in one line. Little-endian versions 2 and 3 are read; what values mean is decided elsewhere.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from gristmill.engine.checkpoint.gguf_quants import BLOCK_SHAPES, tensor_type_name
from gristmill.engine.errors import ModelRefused

MAX_TENSORS = 1 << 17
MAX_METADATA_KEYS = 1 << 16
MAX_ARRAY_ITEMS = 1 << 25
MAX_STRING_BYTES = 1 << 26
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4

_ARRAY, _STRING = 9, 8
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor table. shape: rows first; offset: from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed header. header_bytes: where the tensor data starts."""

    path: str
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, GGUFTensor] = field(repr=False)
    header_bytes: int


def load_gguf(path: str) -> GGUFFile:
    """Read a GGUF header; raises ModelRefused when the file is not a complete, well-formed GGUF."""
    with open(path, "rb") as stream:
        size = stream.seek(0, 2)
        if size < 24:
            raise ModelRefused(f"{path}: {size} bytes is too short for a GGUF file; download it again")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            try:
                return _Parser(path, buffer).parse()
            except UnicodeDecodeError as error:
                raise ModelRefused(f"{path}: text in the header is not UTF-8; download it again") from error


def tensor_bytes(file: GGUFFile, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The raw bytes of one tensor as a read-only memory map, uint8."""
    tensor = file.tensors[name]
    return np.memmap(file.path, np.uint8, "r", tensor.offset, (tensor.num_bytes,))


class _Parser:
    """A cursor over the header."""

    def __init__(self, path: str, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.position = 0

    def parse(self) -> GGUFFile:
        if self._take(4) != b"GGUF":
            raise ModelRefused(f"{self.path}: not a GGUF file; use a .gguf file or a Hugging Face folder")
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelRefused(
                f"{self.path}: GGUF version {version} (or byte order) is not supported;"
                " convert the model to little-endian GGUF version 2 or 3"
            )
        num_tensors = self._count("tensors", MAX_TENSORS)
        num_keys = self._count("metadata keys", MAX_METADATA_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"), 0)
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise ModelRefused(f"{self.path}: alignment {alignment!r} is not a power of two from 8 to 65536")
        start = -(-self.position // alignment) * alignment
        tensors = {entry[0]: self._place(start, *entry) for entry in entries}
        return GGUFFile(self.path, metadata, tensors, start)

    def _place(self, start: int, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GGUFTensor:
        """Turn a table entry into a tensor whose bytes are known to be in the file."""
        type_name = tensor_type_name(type_id)
        if type_name not in BLOCK_SHAPES:
            raise ModelRefused(
                f"{self.path}: tensor {name} is {type_name}, which is not supported;"
                f" use a file of {', '.join(BLOCK_SHAPES)}"
            )
        block_elements, block_bytes = BLOCK_SHAPES[type_name]
        if not shape or min(shape) < 1 or shape[-1] % block_elements:
            raise ModelRefused(
                f"{self.path}: tensor {name} has shape {list(shape)}, but a row of {type_name} is a positive"
                f" multiple of {block_elements}; the file is damaged"
            )
        num_bytes = prod(shape) // block_elements * block_bytes
        if start + offset + num_bytes > self.size:
            raise ModelRefused(
                f"{self.path}: truncated: tensor {name} ends at byte {start + offset + num_bytes}"
                f" but the file has {self.size}; download it again"
            )
        return GGUFTensor(name, shape, type_name, start + offset, num_bytes)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ModelRefused(
                f"{self.path}: tensor {name!r} has {num_dimensions} dimensions,"
                f" the limit is {MAX_DIMENSIONS}; the file is damaged"
            )
        shape = struct.unpack(f"<{num_dimensions}Q", self._take(8 * num_dimensions))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        if kind not in _SCALARS:
            raise ModelRefused(f"{self.path}: metadata of unknown type {kind}; the file is damaged")
        return self._scalar(_SCALARS[kind])

    def _array(self, depth: int) -> list[Any]:
        kind = self._scalar("I")
        count = self._count("array items", MAX_ARRAY_ITEMS)
        if depth > MAX_ARRAY_DEPTH:
            raise ModelRefused(f"{self.path}: arrays nested over {MAX_ARRAY_DEPTH} deep; the file is damaged")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(code))))
        return [self._value(kind, depth) for _ in range(count)]

    def _count(self, what: str, limit: int) -> int:
        """A count that is both under its limit and small enough for what is left of the file."""
        count = self._scalar("Q")
        if count > limit or count > self.size - self.position:
            raise ModelRefused(
                f"{self.path}: {count} {what} is over the limit of {min(limit, self.size - self.position)};"
                " the file is damaged or truncated"
            )
        return int(count)

    def _string(self) -> str:
        return self._take(self._count("bytes in a string", MAX_STRING_BYTES)).decode("utf-8")

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize(code)))[0]

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if end > self.size:
            raise ModelRefused(
                f"{self.path}: truncated: the header goes on after byte {self.size}, where the file ends;"
                " download it again"
            )
        data = self.buffer[self.position : end]
        self.position = end
        return data
