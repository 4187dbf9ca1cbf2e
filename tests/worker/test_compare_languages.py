"""Which language a prompt is in: the shipped rows, other scripts, and what has to stay unknown."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from gristmill.worker.tools.compare.languages import MAX_CHARACTERS, detect_language


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Where is my order? It was due on Friday.", "en"),
        ("Đơn hàng của tôi bị trễ ba ngày rồi.", "vi"),
        ("Đơn hàng của tôi bị trễ ba ngày rồi.".encode().decode().replace("ờ", "o\u031b\u0300"), "vi"),
        ("Où est ma commande ? Elle est en retard et je ne suis pas content.", "fr"),
        ("Wo ist meine Bestellung? Sie ist nicht da und ich warte auf das Paket.", "de"),
        ("¿Dónde está mi pedido? No lo tengo y es para el lunes.", "es"),
        ("注文した商品はいつ届きますか", "ja"),
        ("我的订单什么时候到？", "zh"),
        ("내 주문은 언제 도착하나요?", "ko"),
        ("Где мой заказ? Это был подарок.", "ru"),
        ("Де моє замовлення? Воно її.", "uk"),
        ("Моят пакет не пристига.", "bg"),
        ("Zażółć gęślą jaźń", "pl"),
        ("คำสั่งซื้อของฉันอยู่ที่ไหน", "th"),
        ("What is 12 * 7?", "arithmetic"),
        ("12+30=", "arithmetic"),
        ("Lan có 12 quả cam và cho đi 5 quả. Hỏi còn bao nhiêu quả?", "arithmetic"),
        ("Write a Python function that adds two numbers.", "code"),
        ("def add(a, b):\n    return a + b", "code"),
        ("```\nls -l\n```", "code"),
        ("Viết một hàm Python kiểm tra số nguyên tố.", "code"),
    ],
)
def test_a_prompt_is_known_by_its_language_or_as_code_or_arithmetic(text: str, language: str) -> None:
    assert detect_language(text) == language


@pytest.mark.parametrize(
    "text", ["", "  \n", "🙂🙂", "42", "4821377", "Berlin", "OK", "hello 你好 привет", "xqzt blorf wug"]
)
def test_what_could_be_several_languages_is_unknown(text: str) -> None:
    assert detect_language(text) == "unknown"


@pytest.mark.parametrize(
    "text",
    [
        "The meeting is on 2026-11-29 at 10:30 in the room on the left.",
        "Please call me at 555-1234 and ask for the manager.",
        "I have been waiting for 3-5 days and it is not here.",
        "the order is late and " * 1000 + "đơn hàng của tôi" * MAX_CHARACTERS,
    ],
)
def test_dates_times_and_ranges_are_no_arithmetic_and_the_end_of_a_long_text_is_not_looked_at(
    text: str,
) -> None:
    assert detect_language(text) == "en"


def test_the_shipped_rows_are_forty_or_more_of_four_kinds_and_are_told_apart(repo_root: Path) -> None:
    lines = (repo_root / "examples" / "compare.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    counts = Counter(row["language"] for row in rows)
    assert set(counts) == {"en", "vi", "code", "arithmetic"} and min(counts.values()) >= 10
    assert len({row["custom_id"] for row in rows}) == len(rows) >= 40
    wrong = [row["custom_id"] for row in rows if detect_language(row["prompt"]) != row["language"]]
    assert not wrong
