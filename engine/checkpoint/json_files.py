"""JSON files of a model folder, read with refusals instead of tracebacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gristmill.engine.checkpoint.model_path import open_model_file
from gristmill.engine.errors import ModelRefused


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
