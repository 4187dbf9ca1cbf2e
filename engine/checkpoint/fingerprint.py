"""The fingerprint of a model: what decides its outputs, from headers, sizes and a sample of the data.

Equal files give equal fingerprints on every machine and under every path. Reading takes no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from gristmill.engine.checkpoint.gguf import load_gguf
from gristmill.engine.checkpoint.opening import resolve_dtype
from gristmill.engine.checkpoint.safetensors_header import read_header, weight_files
from gristmill.engine.model_files import find_model_kind

_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "hf_quant_config.json",
)
_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096


def fingerprint(path: str, dtype: str, quantization: str = "auto", kv_dtype: str = "auto") -> str:
    """32 hex digits over configuration, tokenizer, weight headers, sizes and settings; for null: over the URL.

    The settings are those of EngineOptions. Weights trained on, under the same headers, differ by the sample.
    """
    digest = hashlib.sha256()
    settings = [resolve_dtype(dtype)]
    if (quantization, kv_dtype) != ("auto", "auto"):
        settings += [quantization, kv_dtype]
    is_null = path.startswith("null:")
    for part in [path.encode()] if is_null else [*_model_parts(path), *map(str.encode, settings)]:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:32]


def _model_parts(path: str) -> Iterator[bytes]:
    place = Path(path)
    if find_model_kind(path) == "folder":
        for name in _TEXT_FILES:
            if (place / name).is_file():
                yield name.encode()
                yield (place / name).read_bytes()
        for file in weight_files(place):
            header = read_header(file)
            yield file.name.encode()
            yield header
            yield from _data_parts(file, 8 + len(header))
    else:
        start = load_gguf(path).header_bytes
        with place.open("rb") as stream:
            yield stream.read(start)
        yield from _data_parts(place, start)


def _data_parts(file: Path, start: int) -> Iterator[bytes]:
    """The file's size and samples spread evenly over its data."""
    size = file.stat().st_size
    yield size.to_bytes(8, "little")
    with file.open("rb") as stream:
        for index in range(_NUM_SAMPLES):
            stream.seek(start + (size - start) * index // _NUM_SAMPLES)
            yield stream.read(_SAMPLE_BYTES)
