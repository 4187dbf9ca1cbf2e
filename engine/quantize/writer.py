"""The output folder of `gristmill quantize`: a checkpoint in files of one layer each, which a later run continues.

config.json is written last, so the folder can be loaded only once it is complete. Which order it belongs to is in
quantize.json; another order is refused.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from gristmill.engine.checkpoint.safetensors_header import INDEX_NAME
from gristmill.engine.errors import EngineError, ModelRefused
from gristmill.engine.model_files import load_json_object

ORDER_NAME = "quantize.json"
TEMPORARY_SUFFIX = ".unfinished"
_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "LICENSE.txt",
)


class OutputFolder:
    """The folder. File 0 holds the tensors outside of layers, file i layer i - 1."""

    def __init__(self, path: Path, num_files: int) -> None:
        self.path, self._num_files = path, num_files

    @property
    def is_complete(self) -> bool:
        """Nothing is left to do."""
        return (self.path / "config.json").is_file()

    def file(self, index: int) -> Path:
        """Where file `index` lies or will lie."""
        return self.path / f"model-{index + 1:05}-of-{self._num_files:05}.safetensors"

    def has(self, index: int) -> bool:
        """Whether file `index` is finished."""
        return self.file(index).is_file()

    def write(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes file `index`."""
        write_tensors(self.file(index), tensors)

    def read(self, index: int) -> dict[str, Tensor]:
        """The tensors of a finished file."""
        return read_tensors(self.file(index))

    def finish(self, source: Path, config: dict[str, Any], names: Mapping[int, list[str]]) -> None:
        """Copies the tokenizer and writes the index and, last, config.json. names: tensors by file."""
        for name in _COPIED:
            if (source / name).is_file():
                write_file(self.path / name, [(source / name).read_bytes()])
        weight_map = {name: self.file(index).name for index, found in names.items() for name in found}
        total = sum(self.file(index).stat().st_size for index in range(self._num_files))
        _write_json(
            self.path / INDEX_NAME,
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
        )
        _write_json(self.path / "config.json", config)


@contextmanager
def open_output(path: Path, order: Mapping[str, Any], num_files: int) -> Iterator[OutputFolder]:
    """The folder, made or taken up where the same order left it; no other process works in it meanwhile.

    Raises ModelRefused where it holds another order, anything else, or another process works in it.
    """
    check_output(path, order)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            _take_up(path, order)
            yield OutputFolder(path, num_files)
    except OSError as error:
        raise EngineError(f"{path}: {error.strerror}; mend that, then the same command goes on") from error


def check_output(path: Path, order: Mapping[str, Any]) -> None:
    """Raises ModelRefused where the folder holds another order or anything else. Writes nothing."""
    if path.exists() and not path.is_dir():
        raise ModelRefused(f"{path}: not a folder; --output takes one that is empty or not there yet")
    stated = path / ORDER_NAME
    if not stated.is_file():
        if path.is_dir() and any(not file.name.endswith(TEMPORARY_SUFFIX) for file in path.iterdir()):
            raise ModelRefused(f"{path}: not empty and not begun by this command; give another --output")
        return
    found = load_json_object(stated)
    for name in sorted({*found, *order}):
        if found.get(name) != order.get(name):
            raise ModelRefused(
                f"{path}: begun with {name} {found.get(name)!r}, not {order.get(name)!r};"
                " give another --output, or delete the folder"
            )


def _take_up(path: Path, order: Mapping[str, Any]) -> None:
    check_output(path, order)
    if not (path / ORDER_NAME).is_file():
        _write_json(path / ORDER_NAME, order)
    for left in path.glob(f"*{TEMPORARY_SUFFIX}"):
        left.unlink()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the folder against other processes of this machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ModelRefused(f"{path}: another process is quantizing into it; wait for it") from error
        yield
    finally:
        os.close(descriptor)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_file(path, [json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"])


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
