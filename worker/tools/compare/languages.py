"""Which language a prompt is in, or whether it is code or arithmetic, by plain cues; `unknown` rather than a guess.

Scripts and diacritics settle most; Latin letters without any are told apart by common words. Good enough to group rows
by, not to route them.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections import Counter

UNKNOWN = "unknown"
MAX_CHARACTERS = 4000  # of a text are looked at
MAX_EXPRESSION_WORDS, MAX_PROBLEM_WORDS = 20, 50  # around a calculation; in a question of how many
MIN_SCRIPT_SHARE = 0.6  # of a text's letters, for its script to settle the language
MIN_WORD_SHARE = 0.15  # of a text's words that are common ones of the language
MIN_VIETNAMESE_SHARE = 0.15  # of a text's words that have a letter only Vietnamese has
MIN_LEAD = 1.5  # over the language that comes second

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

# (first character, last character, script); letters of Latin are those that none of these holds.
_SCRIPTS = (
    (0x0370, 0x03FF, "el"),
    (0x0400, 0x052F, "cyrillic"),
    (0x0530, 0x058F, "hy"),
    (0x0590, 0x05FF, "he"),
    (0x0600, 0x06FF, "arabic"),
    (0x0900, 0x097F, "devanagari"),
    (0x0980, 0x09FF, "bn"),
    (0x0B80, 0x0BFF, "ta"),
    (0x0C00, 0x0C7F, "te"),
    (0x0E00, 0x0E7F, "th"),
    (0x0E80, 0x0EFF, "lo"),
    (0x10A0, 0x10FF, "ka"),
    (0x1100, 0x11FF, "ko"),
    (0x1780, 0x17FF, "km"),
    (0x3040, 0x30FF, "kana"),
    (0x3400, 0x4DBF, "han"),
    (0x4E00, 0x9FFF, "han"),
    (0xAC00, 0xD7AF, "ko"),
)
_SCRIPT_STARTS = [first for first, _, _ in _SCRIPTS]
_VIETNAMESE = re.compile(
    "[ăđơư\u1ea0-\u1ef9]"
)  # letters and tones that other languages in Latin script do without
_CYRILLIC_LETTERS = {"ru": "ыэёъ", "uk": "іїєґ"}
_ARABIC_LETTERS = {"fa": "پچژگ", "ar": "ةىأإ"}

_COMMON_WORDS = {
    "en": "the of and to in is are was a an that it for on with as this what which who how why when where do does did"
    " can you your i my me we he she they not be have has had will would from at by or if please write give name list"
    " tell explain answer one word sentence",
    "fr": "le la les de des du un une et est sont que qui dans pour sur avec pas ne ce cette il elle nous vous je mon"
    " quel quelle comment pourquoi au aux plus en par",
    "de": "der die das und ist sind ein eine einen nicht mit von zu den dem für auf im ich sie wir wie was warum wer"
    " welche kann bitte es auch",
    "es": "el la los las de del un una y es son que en para por con no se su lo como qué cuál por favor está mi al más",
    "pt": "o a os as de do da dos das um uma e é são que em para por com não se seu como qual está meu ao mais no na",
    "it": "il lo la gli le di del della un una e è sono che in per con non si suo come quale perché mi al più nel",
    "nl": "de het een en is zijn van in op te dat die met voor niet aan er ook wat hoe waarom ik je we wij kan",
}
_WORD_SETS = {language: frozenset(words.split()) for language, words in _COMMON_WORDS.items()}
_WORD = re.compile(r"[^\W\d_]+")


def detect_language(text: str) -> str:
    """`code`, `arithmetic`, an ISO 639-1 code, the name of a script that several languages share, or `unknown`."""
    text = unicodedata.normalize("NFC", text[:MAX_CHARACTERS])
    if is_code(text):
        return "code"
    if is_arithmetic(text):
        return "arithmetic"
    lowered = text.lower()
    scripts = Counter(find_script(char) for char in lowered if char.isalpha())
    num_letters = scripts.total()
    if not num_letters:
        return UNKNOWN
    if scripts["kana"] and scripts["kana"] + scripts["han"] >= MIN_SCRIPT_SHARE * num_letters:
        return "ja"
    script, count = scripts.most_common(1)[0]
    if count < MIN_SCRIPT_SHARE * num_letters:
        return UNKNOWN
    if script == "latin":
        return find_latin_language(lowered)
    if script == "cyrillic":
        return find_by_letters(lowered, _CYRILLIC_LETTERS, script)
    if script == "arabic":
        return find_by_letters(lowered, _ARABIC_LETTERS, script)
    return {"han": "zh", "other": UNKNOWN}.get(script, script)


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


def find_script(letter: str) -> str:
    """The script of a letter, or the language that alone is written in it."""
    code = ord(letter)
    index = bisect_right(_SCRIPT_STARTS, code) - 1
    if index >= 0 and code <= _SCRIPTS[index][1]:
        return _SCRIPTS[index][2]
    return "latin" if unicodedata.name(letter, "").startswith("LATIN") else "other"


def find_by_letters(text: str, letters: dict[str, str], script: str) -> str:
    """The language that alone, of those that share the script, has letters which the text uses; else the script."""
    found = [language for language, own in letters.items() if any(char in text for char in own)]
    return found[0] if len(found) == 1 else script


def find_latin_language(text: str) -> str:
    """The language of a text in Latin letters, in lower case: by Vietnamese letters, else by common words."""
    words = _WORD.findall(text)
    num_vietnamese = sum(_VIETNAMESE.search(word) is not None for word in words)
    if num_vietnamese >= max(1, MIN_VIETNAMESE_SHARE * len(words)):
        return "vi"
    counts = {language: sum(word in common for word in words) for language, common in _WORD_SETS.items()}
    (best, most), (_, second) = Counter(counts).most_common(2)
    enough = max(MIN_WORD_SHARE * len(words), min(2, len(words) - 1), 1)
    return best if most >= enough and most >= MIN_LEAD * second else UNKNOWN
