"""One side of a comparison: a model's path with settings behind commas, as in `PATH,quantization=int4,kv_dtype=fp8`.

A path that holds commas itself is taken as it is where such a file exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gristmill.engine.config import EngineOptions, engine_flags
from gristmill.worker.show.console import UsageRefused

# The fields of EngineOptions that may differ between the sides, with their values.
SETTINGS: Mapping[str, tuple[str, ...]] = {
    name: engine_flags()[name].choices for name in ("quantization", "kv_dtype", "dtype", "cpu_kernels")
}
_SETTING = re.compile(r",\s*[\w-]+\s*=[^,/]*$")


@dataclass(frozen=True, slots=True)
class Side:
    """A model and its settings. label: A or B; path: as it was written."""

    label: str
    path: str
    settings: Mapping[str, str]

    @property
    def name(self) -> str:
        """For people: the path and what is set."""
        return ",".join([self.path, *(f"{key}={value}" for key, value in self.settings.items())])


def parse_side(label: str, text: str) -> Side:
    """A side from its words. UsageRefused names the setting, and the settings there are."""
    path, items = text, list[str]()
    while not os.path.exists(path) and (match := _SETTING.search(path)):
        items.insert(0, match[0][1:])
        path = path[: match.start()]
    if not os.path.exists(path) and os.path.exists(path.partition(",")[0]):
        first = path.partition(",")[2].partition(",")[0]
        raise UsageRefused(f"{label}: {first!r} is not k=v; {_choices()}")
    settings: dict[str, str] = {}
    for item in items:
        key, value = (part.strip() for part in item.split("=", 1))
        key = key.replace("-", "_")
        if key not in SETTINGS:
            raise UsageRefused(f"{label}: {key!r} is not a setting; {_choices()}")
        if key in settings:
            raise UsageRefused(f"{label}: {key} is given twice: give it once")
        if value not in SETTINGS[key]:
            raise UsageRefused(
                f"{label}: {key}={value!r} is not known; choose one of {', '.join(SETTINGS[key])}"
            )
        settings[key] = value
    return Side(label, path, settings)


def build_options(side: Side) -> EngineOptions:
    """The engine options of the side's settings."""
    settings: Mapping[str, Any] = side.settings
    return EngineOptions(**settings)


def _choices() -> str:
    return f"write PATH,k=v,... with any of {', '.join(SETTINGS)}"
