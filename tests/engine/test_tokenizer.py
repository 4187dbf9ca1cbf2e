"""Tokenizers of every kind against transformers: ids, BOS, chat templates, and what is refused."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import transformers

from gristmill.engine.errors import ChatTemplateError, ModelRefused
from gristmill.engine.text.tokenizer import ModelTokenizer, Tokenizer, load_tokenizer
from tests.engine.chats import TEXTS, build_chat, encode_chat
from tests.engine.tiny_models import CHAT_TEMPLATE, build_tiny_gguf, build_tiny_model


@pytest.fixture(scope="module")
def smollm2(smollm2_path: str) -> Tokenizer:
    return load_tokenizer(smollm2_path)


def _reference_chat(reference: Any, text: str) -> list[int]:
    rendered = reference.apply_chat_template(build_chat(text), add_generation_prompt=True, tokenize=False)
    ids: list[int] = reference(rendered, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_ids_of_chats_equal_those_of_transformers(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    tokenizer = load_tokenizer(str(folder))
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer.has_chat_template
    assert tokenizer.vocab_size == len(reference)
    for text in TEXTS:
        assert encode_chat(tokenizer, text) == _reference_chat(reference, text)


def test_a_batch_gives_arrays_in_the_order_of_its_texts(byte_level: Path) -> None:
    tokenizer = load_tokenizer(str(byte_level))
    batch = tokenizer.encode_batch(TEXTS)
    assert all(isinstance(ids, array) and ids.typecode == "I" for ids in batch)
    assert batch == [tokenizer.encode_batch([text])[0] for text in TEXTS]
    assert tokenizer.encode_batch([]) == []


def test_a_gguf_file_gives_the_ids_of_the_folder_it_was_made_from(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m", "llama")
    tokenizer = load_tokenizer(str(folder))
    file = load_tokenizer(str(build_tiny_gguf(folder, tmp_path / "m.gguf")))
    assert file.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert [encode_chat(file, text) for text in TEXTS] == [encode_chat(tokenizer, text) for text in TEXTS]
    assert file.vocab_size == tokenizer.vocab_size == 400


def test_smollm2_splits_digits_and_reads_its_own_template(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids) == (49152, 1, (2, 0))
    rendered = smollm2.render_chat(build_chat("Order 12345 đã đến 😀"))
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert rendered.endswith("<|im_start|>user\nOrder 12345 đã đến 😀<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.encode_batch([rendered])[0]
    assert ids[0] == 1  # <|im_start|>, and no other BOS before it
    assert ids[1] != 1
    assert smollm2.encode_batch(["12345"])[0].tolist() == [33, 34, 35, 36, 37]
    assert smollm2.decode(ids).endswith("user\nOrder 12345 đã đến 😀\nassistant\n")


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "don't pay12345 x", ["don", "'t", "Ġpay", "12345", "Ġx"]),
        ("smollm", "don't pay12345 x", ["don", "'t", "Ġpay", "1", "2", "3", "4", "5", "Ġx"]),
        ("qwen2", "DON'T pay12345 !x", ["DON", "'T", "Ġpay", "1", "2", "3", "4", "5", "Ġ!", "x"]),
        ("llama-bpe", "DON'T pay12345\n\nx", ["DON", "'T", "Ġpay", "123", "45", "ĊĊ", "x"]),
        ("tekken", "aB cD12", ["a", "B", "Ġc", "D", "1", "2"]),
    ],
)
def test_each_pre_tokenizer_of_gguf_splits_as_its_models_do(
    tmp_path: Path, pre: str, text: str, pieces: list[str]
) -> None:
    folder = build_tiny_model(tmp_path / "m", "llama")
    path = build_tiny_gguf(folder, tmp_path / "m.gguf", **{"tokenizer.ggml.pre": pre})
    tokenizer = load_tokenizer(str(path))
    assert isinstance(tokenizer, ModelTokenizer)
    found = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in found] == pieces


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_a_gguf_file_that_does_not_say_adds_bos_where_its_kind_of_model_wants_it(
    tmp_path: Path, pre: str, adds: bool
) -> None:
    folder = build_tiny_model(tmp_path / "m", "llama")
    values = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": None}
    tokenizer = load_tokenizer(str(build_tiny_gguf(folder, tmp_path / "m.gguf", **values)))
    assert (tokenizer.encode_batch(["Hello"])[0][0] == 0) is adds


def test_bos_is_added_once_when_the_post_processor_adds_it(metaspace: Path) -> None:
    tokenizer = load_tokenizer(str(metaspace))
    assert tokenizer.bos_token_id == 1
    raw, chat = tokenizer.encode_batch(["Hello", tokenizer.render_chat(build_chat("Hello"))])
    assert raw.tolist().count(1) == chat.tolist().count(1) == 1
    assert raw[0] == chat[0] == 1


@pytest.mark.parametrize("wanted", [True, False])
def test_add_bos_token_overrules_the_post_processor(metaspace: Path, tmp_path: Path, wanted: bool) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((metaspace / name).read_text())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": wanted}))
    ids = load_tokenizer(str(tmp_path)).encode_batch(["Hello"])[0]
    assert (ids[0] == 1) is wanted


def test_without_a_tokenizer_config_the_post_processor_decides(metaspace: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((metaspace / "tokenizer.json").read_text())
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.has_chat_template) == (1, False)
    assert tokenizer.encode_batch(["Hello"])[0][0] == 1


@pytest.mark.parametrize("wanted", [True, False])
def test_a_gguf_file_says_whether_bos_is_added(tmp_path: Path, wanted: bool) -> None:
    folder = build_tiny_model(tmp_path / "m", "llama")
    path = build_tiny_gguf(folder, tmp_path / "m.gguf", **{"tokenizer.ggml.add_bos_token": wanted})
    assert (load_tokenizer(str(path)).encode_batch(["Hello"])[0][0] == 0) is wanted


def test_the_null_tokenizer_takes_bytes_as_tokens() -> None:
    tokenizer = load_tokenizer("null:?delay_ms=2")
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (257, None, (256,))
    assert not tokenizer.has_chat_template
    ids = tokenizer.encode_batch([tokenizer.render_text("đ😀")])[0]
    assert ids == array("I", list("đ😀".encode()))
    assert tokenizer.decode([*ids, 256]) == "đ😀"
    assert tokenizer.decode(ids[:-1]) == "đ\ufffd"
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.render_chat(build_chat("x"))


def test_a_model_without_a_template_says_so(byte_level: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((byte_level / "tokenizer.json").read_text())
    tokenizer = load_tokenizer(str(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.render_chat(build_chat("x"))


@pytest.mark.parametrize("place", ["config", "list", "jinja", "json"])
def test_a_chat_template_is_found_where_models_keep_it(byte_level: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "tokenizer.json").write_text((byte_level / "tokenizer.json").read_text())
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "wrong"} if place == "jinja" else {}))
    if place == "config":
        config.write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    elif place == "list":
        named = [{"name": "tool_use", "template": "wrong"}, {"name": "default", "template": CHAT_TEMPLATE}]
        config.write_text(json.dumps({"chat_template": named}))
    elif place == "jinja":
        (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    else:
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert load_tokenizer(str(tmp_path)).render_chat(build_chat("Hi")) == expected


def test_an_added_token_without_an_embedding_is_ordinary_text(byte_level: Path, tmp_path: Path) -> None:
    description = json.loads((byte_level / "tokenizer.json").read_text())
    description["added_tokens"].append(description["added_tokens"][0] | {"id": 400, "content": "[PAD]"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    assert load_tokenizer(str(tmp_path)).encode_batch(["[PAD]"])[0].tolist() == [400]
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 400}))
    assert max(load_tokenizer(str(tmp_path)).encode_batch(["[PAD]"])[0]) < 400


def test_tokenizers_that_are_not_bpe_are_refused_by_name(byte_level: Path, tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m", "llama")
    path = tmp_path / "m.gguf"
    for key, value in (("tokenizer.ggml.model", "llama"), ("tokenizer.ggml.pre", "mpt-new")):
        build_tiny_gguf(folder, path, **{key: value})
        with pytest.raises(ModelRefused, match=f"'{value}'"):
            load_tokenizer(str(path))
    description = json.loads((byte_level / "tokenizer.json").read_text())
    unigram = description | {"model": {"type": "Unigram", "vocab": []}}
    wordpiece = description | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    for changed, message in (
        (unigram, "Unigram"),
        (wordpiece, "WordPiece"),
        ({"model": {"merges": 1}}, "damaged"),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
        with pytest.raises(ModelRefused, match=message):
            load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelRefused, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ModelRefused, match="no such model"):
        load_tokenizer(str(tmp_path / "missing"))
