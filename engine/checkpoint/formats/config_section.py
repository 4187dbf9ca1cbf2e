"""One object of a model's configuration, read with refusals that name the file, the key and its value.

A quantization configuration decides how every weight is read, so what is not understood is refused, never skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gristmill.engine.errors import ModelRefused

MAX_SHOWN_SIZE = 100  # characters of a value in a message
REMEDY = "use a checkpoint without it, or the model's bfloat16 weights with --quantization"


@dataclass(frozen=True, slots=True)
class ConfigSection:
    """An object's values, the file that it is in, and its dotted name there, empty for the whole file.

    remedy: what helps where a number is not one.
    """

    file: str
    name: str
    values: Mapping[str, Any]
    remedy: str = "quantize the model again"

    @property
    def place(self) -> str:
        """What messages call it: `/models/x/config.json: quantization_config`."""
        return f"{self.file}: {self.name}" if self.name else self.file

    def refused(
        self, key: str, remedy: str = REMEDY, problem: str = "which is not supported"
    ) -> ModelRefused:
        """The refusal of what `key` says."""
        shown = repr(self.values.get(key))
        if len(shown) > MAX_SHOWN_SIZE:
            shown = f"{shown[:MAX_SHOWN_SIZE]}..."
        place = f"{self.place}{'.' if self.name else ': '}{key}"
        return ModelRefused(f"{place} is {shown if key in self.values else 'missing'}, {problem}; {remedy}")

    def within(self, key: str) -> ConfigSection:
        """The object that `key` holds."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.refused(key, "an object is needed, download the file again")
        return ConfigSection(self.file, f"{self.name}.{key}", value)

    def one_of(self, key: str, allowed: Collection[Any], default: Any = None) -> Any:
        """The value of `key`, one of `allowed`; a key that is absent or null has the default."""
        value = self.values.get(key)
        if value is None and (default is not None or None in allowed):
            return default
        if isinstance(value, (dict, list)) or value not in allowed:
            names = ", ".join(str(name) for name in allowed if name is not None)
            raise self.refused(key, f"Gristmill reads {names}; {REMEDY}")
        return value

    def strings(self, key: str) -> tuple[str, ...] | None:
        """The list of strings that `key` holds; None where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refused(key, "a list of strings is needed, download the file again")
        return tuple(value)

    def size(self, key: str, default: int | None = None) -> int:
        """The positive whole number that `key` holds; the default, where there is one, if it is absent or null."""
        value = self.values.get(key)
        return default if value is None and default is not None else self._whole(key, value)

    def number(self, key: str, default: float | None = None) -> float:
        """The number that `key` holds; the default, where there is one, if it is absent."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refused(key, self.remedy, "a number is needed")
        return float(value)

    def sizes(self, key: str) -> tuple[int, int]:
        """The two positive whole numbers that `key` holds: a list, or text such as 128x128."""
        value = self.values.get(key)
        if isinstance(value, str):
            value = [int(part) if part.isdecimal() else 0 for part in value.split("x")]
        if not isinstance(value, list) or len(value) != 2:
            raise self.refused(key, "two sizes are needed, [128, 128]; download the file again")
        return self._whole(key, value[0]), self._whole(key, value[1])

    def refuse_set(self, keys: Collection[str]) -> None:
        """Raises ModelRefused for one of the keys that says something."""
        for key in keys:
            if self.values.get(key):
                raise self.refused(key)

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Raises ModelRefused for a key that says something and isn't known here."""
        for key, value in self.values.items():
            if key not in known and value not in (None, False, "", [], {}):
                raise self.refused(key)

    def _whole(self, key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refused(key, self.remedy, "a positive whole number is needed")
        return value
