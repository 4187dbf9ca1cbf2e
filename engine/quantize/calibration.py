"""The text that calibration runs through a model: rows of a file, or the text that ships beside this module.

Rows become one stream of tokens, cut into sequences of equal length.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.engine.config import ModelConfig
from gristmill.engine.errors import ChatTemplateError, ModelRefused
from gristmill.engine.text.tokenizer import Tokenizer

DEFAULT_TOKENS = 32768
SEQUENCE_TOKENS = 512
MIN_TOKENS = 512
_BUILT_IN = Path(__file__).with_name("calibration.txt")
_COLUMNS = ("messages", "text", "prompt")


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Rows, each a text or a list of chat messages. name: for people; digest: of the bytes they came from."""

    name: str
    rows: tuple[str | list[dict[str, Any]], ...]
    digest: str


def load_text(path: Path | None) -> CalibrationText:
    """The rows of a file, .jsonl (a column messages, text or prompt) or plain text; None: the built-in text.

    Of plain text, paragraphs are rows. Raises ModelRefused.
    """
    place = _BUILT_IN if path is None else path
    try:
        data = place.read_bytes()
        text = data.decode()
    except OSError as error:
        raise ModelRefused(
            f"{place}: can't be read ({error.strerror}); --calibrate takes a text or .jsonl file"
        ) from error
    except UnicodeDecodeError as error:
        raise ModelRefused(f"{place}: not UTF-8 at byte {error.start}; convert it") from error
    if place.suffix in (".jsonl", ".ndjson"):
        rows = tuple(_json_rows(place, text))
    else:
        rows = tuple(part.strip("\n") + "\n\n" for part in text.split("\n\n") if part.strip())
    if not rows:
        raise ModelRefused(f"{place}: no rows; --calibrate takes a file with text in it")
    name = "built-in text" if path is None else str(path)
    return CalibrationText(name, rows, hashlib.sha256(data).hexdigest()[:32])


def build_sequences(
    text: CalibrationText, tokenizer: Tokenizer, config: ModelConfig, max_tokens: int
) -> list[list[int]]:
    """At most max_tokens token ids in sequences of equal length. Raises ModelRefused where the text is too short.

    A sequence is as long as SEQUENCE_TOKENS, the model's context and its sliding window allow.
    """
    size = min(SEQUENCE_TOKENS, config.context_size, config.sliding_window or SEQUENCE_TOKENS)
    ids: list[int] = []
    for row in text.rows:
        ids += tokenizer.encode_batch([_rendered(row, tokenizer)])[0]
        if len(ids) >= max_tokens:
            break
    num_tokens = min(len(ids), max_tokens) // size * size
    if num_tokens < MIN_TOKENS:
        raise ModelRefused(
            f"{text.name}: {len(ids)} tokens are too few to calibrate with, {MIN_TOKENS} are needed; give more rows"
        )
    return [ids[start : start + size] for start in range(0, num_tokens, size)]


def _rendered(row: str | list[dict[str, Any]], tokenizer: Tokenizer) -> str:
    if isinstance(row, str):
        return tokenizer.render_text(row)
    try:
        return tokenizer.render_chat(row)
    except ChatTemplateError as error:
        raise ModelRefused(f"calibration row with messages: {error}; give rows with text") from error


def _json_rows(path: Path, text: str) -> Iterator[str | list[dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ModelRefused(f"{path}: line {number} is not JSON ({error}); mend the line") from error
        value = next((row[name] for name in _COLUMNS if name in row), None) if isinstance(row, dict) else row
        if isinstance(value, str):
            yield value
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield value
        else:
            raise ModelRefused(
                f"{path}: line {number} has none of {', '.join(_COLUMNS)}; give rows with one of these columns"
            )
