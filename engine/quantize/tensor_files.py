"""Whole safetensors files in and out, each written so that it is either complete or not there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from gristmill.engine.errors import EngineError, ModelRefused

TEMPORARY_SUFFIX = ".unfinished"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes one safetensors file."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_file(path, [save(contiguous, {"format": "pt"})])


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file that write_tensors wrote. Raises ModelRefused for a damaged one."""
    try:
        return load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise ModelRefused(f"{path}: damaged ({error}); delete the file, the same command goes on") from error


def write_file(path: Path, parts: Iterable[bytes]) -> None:
    """Writes, syncs and renames: after a crash the file is there with all of its bytes, or it is not there.

    Raises EngineError where the disk refuses.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as stream:
            for part in parts:
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        message = f"{path}: can't be written ({error.strerror}); mend that, then the same command goes on"
        raise EngineError(message) from error
