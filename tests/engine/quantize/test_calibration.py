"""Calibration text: rows of each kind of file, sequences, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.engine.config import ModelConfig
from gristmill.engine.errors import ModelRefused
from gristmill.engine.quantize.calibration import build_sequences, load_text
from gristmill.engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.engine.tiny_models import build_tiny_model

CONFIG = ModelConfig("llama", 400, 64, 96, 2, 4, 2, 16, 256, 1e-5, 1e4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(build_tiny_model(tmp_path_factory.mktemp("calibration"), "llama")))


def test_the_built_in_text_has_many_languages_code_and_arithmetic() -> None:
    text = load_text(None)
    whole = "".join(row for row in text.rows if isinstance(row, str))
    for part in ("def ", "SELECT", "= 156", "Đơn hàng", "图书馆", "Библиотека", "المكتبة", "पुस्तकालय"):
        assert part in whole
    assert len(text.rows) > 50


def test_rows_of_json_are_texts_prompts_and_chats(tmp_path: Path, tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "Where is my order?"}]
    rows = [{"text": "one\u2028line"}, {"prompt": "two"}, {"messages": chat}, "three"]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    text = load_text(file)
    assert text.rows == ("one\u2028line", "two", chat, "three")
    long = replace(text, rows=text.rows * 100)
    (first, *_) = build_sequences(long, tokenizer, CONFIG, 2048)
    assert "user\nWhere is my order?" in tokenizer.decode(first)


def test_sequences_are_of_one_length_and_within_context_and_window(tokenizer: Tokenizer) -> None:
    text = load_text(None)
    for config, size in (
        (CONFIG, 256),
        (replace(CONFIG, context_size=4096), 512),
        (replace(CONFIG, sliding_window=100), 100),
    ):
        found = build_sequences(text, tokenizer, config, 2048)
        assert {len(sequence) for sequence in found} == {size}
        assert len(found) == 2048 // size
    assert found == build_sequences(text, tokenizer, config, 2048)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", "no rows"),
        ("a.txt", b"hello", "5 tokens are too few|are too few"),
        ("a.txt", b"\xff\xfe", "not UTF-8 at byte 0"),
        ("a.jsonl", b'{"text": "a"}\n{', "line 2 is not JSON"),
        ("a.jsonl", b'{"body": "a"}', "line 1 has none of messages, text, prompt"),
        ("a.jsonl", b'{"messages": []}', "line 1 has none of"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "calibration row|too few"),
    ],
)
def test_a_file_that_is_no_help_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ModelRefused, match=message) as caught:
        build_sequences(load_text(tmp_path / name), tokenizer, CONFIG, 1024)
    assert "\n" not in str(caught.value)
