"""The models that a worker offers: a name for jobs to use, and on this machine a path with its fingerprints.

Built once, when the worker starts: what can't be run is refused then, in one line. Loads no weights, imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.engine.checkpoint.fingerprint import fingerprint
from gristmill.engine.checkpoint.opening import check_quantization, load_checkpoint, resolve_dtype
from gristmill.engine.config import EngineOptions
from gristmill.engine.errors import ModelRefused
from gristmill.engine.null_engine import is_null_url, parse_null_url
from gristmill.jobs.errors import RefusedError
from gristmill.jobs.records import ModelOffer
from gristmill.jobs.storage.folder import is_s3
from gristmill.worker.serve.model_cache import ModelCache

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
_GGUF = ".gguf"
_DTYPES = ("float32", "bfloat16")
DEFAULT_OPTIONS = EngineOptions()
_HOW = "write --model NAME=PATH, like --model smollm2=models/smollm2-135m-instruct.gguf"


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model in one dtype. accepts: the values of a job's `dtype` that it serves."""

    name: str
    dtype: str  # what the engine is started with: float32 or bfloat16
    accepts: tuple[str, ...]
    fingerprint: str


class Catalog:
    """Models by name; each has an entry for the dtype that `auto` means here, first, and one for the other."""

    def __init__(self, paths: dict[str, str], engine_options: EngineOptions = DEFAULT_OPTIONS) -> None:
        """`paths`: what is on this machine, by name; engine_options: of all of them, but for the dtype.

        Raises RefusedError or ModelRefused.
        """
        if not paths:
            raise RefusedError(f"no model to offer: {_HOW}, or --models FOLDER")
        self._paths = dict(sorted(paths.items()))
        self._options = engine_options
        self._entries = tuple(
            entry for name, path in self._paths.items() for entry in _load_entries(name, path, engine_options)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The models' names, sorted."""
        return tuple(self._paths)

    def entries(self) -> list[CatalogEntry]:
        """Every model in every dtype that it can be run in."""
        return list(self._entries)

    def path(self, name: str) -> str:
        """What EngineOptions' model and load_tokenizer take: a local path or a null: URL."""
        return self._paths[name]

    def offer(self, entry: CatalogEntry) -> ModelOffer:
        """The entry as the database matches it with jobs."""
        return ModelOffer(entry.name, entry.accepts, entry.fingerprint)

    def check_unchanged(self, entry: CatalogEntry) -> None:
        """To be called before the engine loads it: raises ModelRefused when other weights lie there by now."""
        path = self._paths[entry.name]
        if _fingerprint(path, entry.dtype, self._options) != entry.fingerprint:
            raise ModelRefused(
                f"model {entry.name} changed under {path} since this worker started: start the worker again"
            )


def load_catalog(
    models: Sequence[str],
    folders: Sequence[str] = (),
    cache: ModelCache | None = None,
    engine_options: EngineOptions = DEFAULT_OPTIONS,
) -> Catalog:
    """The catalog of `--model NAME=PATH` and `--models FOLDER` options; a model in S3 is copied to the cache.

    Raises RefusedError, ModelRefused, or SourceUnavailable where the object store does not answer.
    """
    cache = cache or ModelCache()
    found: dict[str, str] = {}
    for name, place in [*map(split_option, models), *_list_models(folders, cache)]:
        check_name(name, place)
        if name in found:
            raise RefusedError(
                f"two models are named {name} ({found[name]} and {place}): give each its own name"
            )
        found[name] = place
    return Catalog({name: _to_local(place, cache) for name, place in found.items()}, engine_options)


def split_option(option: str) -> tuple[str, str]:
    """NAME=PATH as its two halves; the path may hold more equal signs."""
    name, equals, place = option.partition("=")
    if not equals or not name or not place:
        raise RefusedError(f"--model {option} names no model: {_HOW}")
    return name, place


def check_name(name: str, place: str) -> None:
    """Refuses a name that can't be that of a queue."""
    if not _NAME.fullmatch(name):
        raise RefusedError(
            f"{name!r} can't be the name of the model {place}: letters, digits, '.', '_' and '-', 100 at most, a"
            f" letter or digit first; {_HOW}"
        )


def _list_models(folders: Iterable[str], cache: ModelCache) -> Iterable[tuple[str, str]]:
    """The models directly below each folder, as (name, place); a folder without one is refused."""
    for folder in folders:
        found = cache.list_models(folder) if is_s3(folder) else _list_local(Path(folder).expanduser())
        if not found:
            raise RefusedError(
                f"--models {folder} holds no model: it is looked through for *{_GGUF} files and for folders with"
                f" a config.json; or {_HOW}"
            )
        yield from found


def _list_local(folder: Path) -> list[tuple[str, str]]:
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise RefusedError(f"--models {folder} can't be read ({error.strerror}): name a folder") from error
    return [
        (path.name.removesuffix(_GGUF), str(path))
        for path in paths
        if (path.name.endswith(_GGUF) and path.is_file()) or (path / "config.json").is_file()
    ]


def _to_local(place: str, cache: ModelCache) -> str:
    if is_null_url(place):
        return place
    return str(cache.fetch(place)) if is_s3(place) else os.path.abspath(os.path.expanduser(place))


def _load_entries(name: str, path: str, options: EngineOptions) -> Iterable[CatalogEntry]:
    """The model's entries, after a look at its headers that refuses what can't be run."""
    if is_null_url(path):
        parse_null_url(path)  # it has no weights: one entry serves every dtype
        yield CatalogEntry(name, "float32", ("auto", *_DTYPES), _fingerprint(path, "float32", options))
        return
    check_quantization(load_checkpoint(path), options.quantization)
    usual = resolve_dtype("auto")
    yield CatalogEntry(name, usual, ("auto", usual), _fingerprint(path, usual, options))
    for dtype in _DTYPES:
        if dtype != usual:
            yield CatalogEntry(name, dtype, (dtype,), _fingerprint(path, dtype, options))


def _fingerprint(path: str, dtype: str, options: EngineOptions) -> str:
    return fingerprint(path, dtype, options.quantization, options.kv_dtype)
