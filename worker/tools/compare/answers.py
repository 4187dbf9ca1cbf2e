"""What two answers to one prompt have in common, judged on texts and tokens alone: no model, no probabilities."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from typing import NoReturn

from gristmill.worker.show.console import UsageRefused

_WORD = re.compile(r"\w+(?:[.,'’-]\w+)*")


def parse_choices(text: str | None) -> tuple[str, ...]:
    """The choices of `a,b,c`; none where there are none. UsageRefused for fewer than two, or the same twice."""
    if text is None:
        return ()
    choices = tuple(part.strip() for part in text.split(",") if part.strip())
    if len(choices) < 2:
        raise UsageRefused(f"--choices {text!r}: give two or more, with commas between them: yes,no")
    if len({_fold(choice) for choice in choices}) < len(choices):
        raise UsageRefused(f"--choices {text!r} names a choice twice: give each once")
    return choices


def find_choice(text: str, choices: Sequence[str]) -> str | None:
    """The choice that stands first in the text as whole words, in any case; without choices the first word."""
    folded = _fold(text)
    if not choices:
        match = _WORD.search(folded)
        return match[0] if match else None
    places = []
    for choice in choices:
        match = re.search(rf"(?<!\w){re.escape(_fold(choice))}(?!\w)", folded)
        if match:
            places.append((match.start(), -len(choice), choice))
    return min(places)[2] if places else None


def is_json(text: str) -> bool:
    """Whether the whole text is one JSON object or list; NaN and the infinities are no JSON."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse_constant), (dict, list))
    except (ValueError, RecursionError):
        return False


def count_common(first: Sequence[object], second: Sequence[object]) -> int:
    """How many items the two begin with before they differ, or one of them ends."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


def _fold(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
