"""What a --model path names, and reading the files of a model with refusals instead of tracebacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO, Literal

from gristmill.engine.errors import ModelRefused

ModelKind = Literal["null", "folder", "gguf"]
_CHOICES = "--model takes a Hugging Face folder, a .gguf file or null:"


def open_model_file(path: Path) -> BinaryIO:
    """Open a file of the model for reading; raises ModelRefused when that is not allowed."""
    try:
        return path.open("rb")
    except OSError as error:
        raise ModelRefused(f"{path}: can't be read ({error.strerror}); check its permissions") from error


def find_model_kind(path: str) -> ModelKind:
    """null: a null: URL; gguf: a file that starts as one does; raises ModelRefused for anything else."""
    place = Path(path)
    if path.startswith("null:"):
        return "null"
    if place.is_dir():
        return "folder"
    if not place.exists():
        raise ModelRefused(f"{path}: no such model; {_CHOICES}")
    if not place.is_file():
        raise ModelRefused(f"{path}: neither a file nor a folder; {_CHOICES}")
    with open_model_file(place) as stream:
        if stream.read(4) != b"GGUF":
            raise ModelRefused(f"{path}: not a GGUF file; {_CHOICES}")
    return "gguf"


def load_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises ModelRefused when the file is not one."""
    with open_model_file(path) as stream:
        data = stream.read()
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ModelRefused(f"{path}: not valid JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise ModelRefused(
            f"{path}: a JSON object is expected, found {type(value).__name__}; download the file again"
        )
    return value


def load_optional_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object, or an empty one when there is no such file."""
    return load_json_object(path) if path.is_file() else {}
