"""Which modules of a checkpoint are quantized, and how: rules that each format's configuration is turned into.

Every format names modules in a language of its own: whole names, parts of names, regular expressions, wildcards. All
become regular expressions here. Nothing in this file knows how weights are stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import translate

from gristmill.engine.checkpoint.formats.scheme import Scheme
from gristmill.engine.errors import ModelRefused

EVERY_MODULE = re.compile("")
HEAD = re.compile(r"lm_head\Z")


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules with a name that `pattern` matches from its start on; scheme None: they keep an ordinary weight."""

    pattern: re.Pattern[str]
    scheme: Scheme | None = None


def compile_pattern(place: str, pattern: str) -> re.Pattern[str]:
    """A regular expression from a configuration file. place: of the pattern, for the refusal of a broken one."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ModelRefused(
            f"{place}: {pattern!r} is not a regular expression ({error}); correct it"
        ) from error


def exact_pattern(name: str) -> re.Pattern[str]:
    """Matches this module only."""
    return re.compile(re.escape(name) + r"\Z")


def tree_pattern(place: str, name: str) -> re.Pattern[str]:
    """Matches a module, those inside it, and those whose names end with it: the skip lists of transformers.

    The name is a regular expression that ends at a dot: `mlp.gate` is not `mlp.gate_proj`.
    """
    inside = compile_pattern(place, name).pattern
    return re.compile(rf"(?:{inside})(?:\.|\Z|(?<=\.))|.*{re.escape(name)}\Z")


def part_pattern(part: str) -> re.Pattern[str]:
    """Matches every module with `part` in its name; a number at its end is whole: `layers.1` isn't `layers.11`."""
    return re.compile(rf".*{re.escape(part)}(?!(?<=\d)\d)")


def wildcard_pattern(wildcard: str) -> re.Pattern[str]:
    """Matches names by * and ?, and the modules inside those."""
    return re.compile(f"{translate(wildcard)}|{translate(wildcard + '.*')}")


def find_scheme(rules: Iterable[Rule], module: str) -> Scheme | None:
    """What the first rule that matches says; None where none does."""
    for rule in rules:
        if rule.pattern.match(module):
            return rule.scheme
    return None
