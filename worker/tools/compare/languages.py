"""Which language a prompt is in, or whether it is code or arithmetic; `unknown` rather than a guess.

Code and arithmetic are known by plain cues of ours, languages by py3langid, whose wheel holds its model. Good enough
to group rows by, not to route them.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache

from py3langid.langid import MODEL_FILE, LanguageIdentifier

UNKNOWN = "unknown"
MAX_CHARACTERS = 4000  # of a text are looked at
MAX_EXPRESSION_WORDS, MAX_PROBLEM_WORDS = 20, 50  # around a calculation; in a question of how many
MIN_PROBABILITY = 0.3  # of a language, for it to be named
NO_LANGUAGE = "zxx"  # the library's word for numbers and signs

_CODE_CUES = [
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"^\s*(?:def|class)\s+\w+.*:\s*$",
        r"^\s*(?:import|from)\s+[\w.]+",
        r"^\s*#include\s*[<\"]",
        r"\b(?:public|private|static)\s+\w+\s+\w+\s*\(",
        r"\b(?:function|fn|func)\s+\w+\s*\(",
        r"\b(?:const|let|var)\s+\w+\s*=",
        r"(?i:\bselect\b.{1,200}\bfrom\s+\w+)",
        r"(?:=>|->|!=|==|&&|\|\||\+=|::)",
        r"\breturn\b[^.]*;?$",
        r"\w+\([^()]*\)\s*[;{:]",
        r"^\s*[}\])]+;?\s*$",
        r"\bprint(?:f|ln)?\(",
        r"\w+\[[\w:'\"-]+\]",
        r"\b\w+\.\w+\(",
        r"\b[a-z_]\w* = [\w\[({'\"]",
        r"\b(?:int|void|char|double|bool)\s+\w+\s*\(",
        r"</?[a-z]+[^<>]*>",
    )
]
_FENCE = re.compile(r"^\s*(?:```|~~~)", re.MULTILINE)
_TOOLS = r"(?:python|javascript|typescript|java|sql|bash|shell|rust|golang|html|css|c\+\+|c#|php|ruby|kotlin|regex)"
_THINGS = (
    r"(?:function|program|script|code|query|class|method|snippet|loop|expression|command|line|regex|hàm|lệnh)"
)
_ASKS_FOR_CODE = re.compile(
    rf"(?<!\w){_TOOLS}(?!\w).{{0,60}}\b{_THINGS}\b|\b{_THINGS}\b.{{0,60}}(?<!\w){_TOOLS}(?!\w)"
    r"|\b(?-i:C) (?:function|program)\b",
    re.I,
)

_NUMBER = r"(?<![\w.])[-−]?\d[\d.,]*%?"
_EXPRESSION = re.compile(  # a date, a time and a range are none: - and / count with spaces around them only
    rf"{_NUMBER}(?:\s*(?:[+*×÷^]|\*\*)\s*|\s+(?:[-−/x]|chia|nhân|cộng|trừ|times|plus|minus|divided by)\s+)\(?[-−]?\d"
)
_NUMBERS = re.compile(_NUMBER)
_HOW_MANY = re.compile(
    r"\b(?:how (?:many|much|far|long|old|fast)|total|sum of|product of|percent|average|remainder|bao nhiêu"
    r"|tổng|trung bình|phần trăm|combien|wie ?viele?|cuánt[oa]s?)\b|%\s*of\b|% của\b",
    re.I,
)

_WORD = re.compile(r"[^\W\d_]+")


def detect_language(text: str) -> str:
    """`code`, `arithmetic`, an ISO 639 code, or `unknown`."""
    text = unicodedata.normalize("NFC", text[:MAX_CHARACTERS])
    if is_code(text):
        return "code"
    if is_arithmetic(text):
        return "arithmetic"
    if not _WORD.search(text):
        return UNKNOWN
    language, probability = _load_identifier().classify(text)
    return str(language) if probability >= MIN_PROBABILITY and language != NO_LANGUAGE else UNKNOWN


def is_code(text: str) -> bool:
    """Whether the text holds code (a fence, or two unlike signs of it) or asks for some."""
    if _FENCE.search(text) or _ASKS_FOR_CODE.search(text):
        return True
    return sum(cue.search(text) is not None for cue in _CODE_CUES) >= 2


def is_arithmetic(text: str) -> bool:
    """Whether the text is a short calculation, or asks how many there are and gives two numbers."""
    num_words = len(_WORD.findall(text))
    if _EXPRESSION.search(text) and num_words <= MAX_EXPRESSION_WORDS:
        return True
    if num_words > MAX_PROBLEM_WORDS:
        return False
    return bool(_HOW_MANY.search(text)) and len(_NUMBERS.findall(text)) >= 2


@cache
def _load_identifier() -> LanguageIdentifier:
    """The model that the library ships, 1.7 to 5 s on two busy cores to read."""
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
