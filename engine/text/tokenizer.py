"""Text to token ids and back, with the model's own tokenizer and chat template; imports no torch.

User text can't write control tokens: when it spells one, e.g. <|im_end|>, it is encoded as ordinary text.
Such a prompt goes from render_chat to encode_batch as a guarded text, where only the template's tokens count.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from array import array
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from gristmill.engine.checkpoint.gguf import load_gguf
from gristmill.engine.errors import ChatTemplateError, ModelRefused
from gristmill.engine.model_files import find_model_kind
from gristmill.engine.text.chat import ChatTemplate
from gristmill.engine.text.gguf_tokenizer import gguf_tokenizer_spec
from gristmill.engine.text.piece_memo import EncodeTexts, PieceMemo, can_cut
from gristmill.engine.text.token_bytes import TokenBytes
from gristmill.engine.text.tokenizer_spec import TokenizerSpec, hf_tokenizer_spec

NULL_EOS = 256
_BYTES = tuple(bytes([i]) for i in range(256))
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one growing sequence: bytes first, then UTF-8.

    A character whose bytes are spread over tokens appears when its last byte does; bytes that can't be UTF-8 become
    U+FFFD. The text of ids pushed one by one always equals the text of all of them together. token_bytes: id ->
    bytes, empty for tokens that are not shown.
    """

    __slots__ = ("_decoder", "_strip_space", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes], strip_space: bool) -> None:
        self._token_bytes = token_bytes
        self._strip_space = strip_space  # the first character, when a space, belongs to the tokenizer
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        data = self._token_bytes(token_id)
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never became complete."""
        return self._decoder.decode(b"", True)


def decode_all(detokenizer: Detokenizer, token_ids: Iterable[int]) -> str:
    """The whole text of a fresh detokenizer."""
    return "".join([*map(detokenizer.push, token_ids), detokenizer.finish()])


class Tokenizer(Protocol):
    """What the worker and the engine need of a tokenizer: ModelTokenizer or NullTokenizer."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool

    def render_chat(self, messages: list[dict[str, Any]]) -> str: ...

    def render_text(self, text: str) -> str: ...

    def encode_batch(self, texts: list[str]) -> list[array[int]]: ...

    def decode(self, token_ids: Iterable[int]) -> str: ...

    def detokenizer(self) -> Detokenizer: ...


def load_tokenizer(model_path: str) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, a GGUF file or a `null:` URL; raises ModelRefused."""
    kind = find_model_kind(model_path)
    if kind == "null":
        return NullTokenizer()
    if kind == "folder":
        return ModelTokenizer(hf_tokenizer_spec(Path(model_path)))
    return ModelTokenizer(gguf_tokenizer_spec(load_gguf(model_path)))


class ModelTokenizer:
    """The tokenizer of a model."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self._spec = spec
        self._backend = _build_backend(spec.backend, spec.origin)
        self._encode_texts = _build_encode(spec.backend, self._backend)
        self._bytes = TokenBytes(spec.backend, self._backend, spec.origin)
        # Neither can be guessed, so no text contains them; digits pass a template's filters unchanged.
        self._guard = f"\ue000{secrets.randbelow(10**20):020}\ue001"
        self._break = f"{secrets.randbelow(10**20):020}"
        special = [item["content"] for item in spec.backend.get("added_tokens") or [] if item.get("special")]
        self._special = _any_of([text for text in special if len(text) > 1])
        self._template = None
        if spec.chat_template is not None:
            self._template = ChatTemplate(spec.chat_template, spec.special_tokens, spec.origin)
        self.has_chat_template = self._template is not None
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = spec.eos_token_ids
        self.bos_token_id, self._adds_bos = self._find_bos()

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        """The prompt of a chat, for encode_batch; raises ChatTemplateError in the template's own words."""
        if self._template is None:
            raise ChatTemplateError("this model has no chat template")
        broken = [_map_texts(message, self._break_special) for message in messages]
        if broken == messages:
            return self._template.render(messages)
        text = self._special.sub(lambda match: self._guarded(match[0]), self._template.render(broken))
        return self._guard + text.replace(self._break, "")

    def render_text(self, text: str) -> str:
        """A prompt for a model without a chat template, for encode_batch only."""
        return self._guard + text if self._special.search(text) else text

    def encode_batch(self, texts: list[str]) -> list[array[int]]:
        """Ids of rendered texts, each with exactly one BOS if the model wants one."""
        guarded = [index for index, text in enumerate(texts) if text.startswith(self._guard)]
        result = self._encode(self._encode_texts, texts)
        if guarded:
            bodies = [texts[index].removeprefix(self._guard) for index in guarded]
            for index, token_ids in zip(guarded, self._encode(self._encode_guarded, bodies), strict=True):
                result[index] = token_ids
        return result

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of these ids without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return decode_all(self.detokenizer(), token_ids)

    def detokenizer(self) -> Detokenizer:
        """A decoder of ids as they come; its text equals decode() of all of them."""
        return Detokenizer(self._bytes.__getitem__, self._bytes.strips_leading_space)

    @cached_property
    def _encode_guarded(self) -> EncodeTexts:
        return _build_encode(self._spec.backend, self._guarded_backend())

    def _guarded_backend(self) -> tokenizers.Tokenizer:
        """The same tokenizer with guarded names for special tokens, so that their plain names are text."""
        added = self._spec.backend.get("added_tokens") or []
        names = {item["content"]: self._guarded(item["content"]) for item in added if item.get("special")}
        model = dict(self._spec.backend["model"])
        merged = {
            "".join(pair) if isinstance(pair, list) else pair.replace(" ", "") for pair in model["merges"]
        }
        plain = {names[token]: i for token, i in model["vocab"].items() if token in names and token in merged}
        hidden = {token: name for token, name in names.items() if token not in merged}
        model["vocab"] = {hidden.get(token, token): i for token, i in model["vocab"].items()} | plain
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        renamed = [item | {"content": names.get(item["content"], item["content"])} for item in added]
        parts = {"added_tokens": renamed, "model": model, "post_processor": None}
        backend = _build_backend(self._spec.backend | parts, self._spec.origin)
        for name, guarded in names.items():
            assert backend.token_to_id(guarded) == self._backend.token_to_id(name), name
        return backend

    def _guarded(self, special: str) -> str:
        return f"{self._guard}{special}{self._guard}"

    def _break_special(self, text: str) -> str:
        """The text with a mark inside every special token that it spells."""
        while match := self._special.search(text):
            cut = match.start() + 1
            text = text[:cut] + self._break + text[cut:]
        return text

    def _encode(self, encode: EncodeTexts, texts: list[str]) -> list[array[int]]:
        result = encode(texts)
        if self._adds_bos:
            assert self.bos_token_id is not None
            for token_ids in result:
                if not token_ids or token_ids[0] != self.bos_token_id:
                    token_ids.insert(0, self.bos_token_id)
        return result

    def _find_bos(self) -> tuple[int | None, bool]:
        """(BOS, whether a prompt starts with it): as the files say, else as the post-processor does."""
        first = self._backend.encode("").ids[:1]
        name = self._spec.special_tokens.get("bos_token")
        if name is None:
            bos = next((i for i in first if i not in self.eos_token_ids), None)
        else:
            bos = self._backend.token_to_id(name)
        adds = bos in first if self._spec.add_bos is None else self._spec.add_bos
        return bos, adds and bos is not None


class NullTokenizer:
    """Of the engine without weights: a byte is a token, and 256 ends a text; no BOS and no chat template."""

    vocab_size = 257
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = (NULL_EOS,)
    has_chat_template = False

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        """Always raises ChatTemplateError: there is no template."""
        raise ChatTemplateError("this model has no chat template")

    def render_text(self, text: str) -> str:
        """The text itself: it can't spell a control token."""
        return text

    def encode_batch(self, texts: list[str]) -> list[array[int]]:
        """The UTF-8 bytes of each text as ids."""
        return [array("I", list(text.encode())) for text in texts]

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of these ids."""
        return decode_all(self.detokenizer(), token_ids)

    def detokenizer(self) -> Detokenizer:
        """A decoder of ids as they come."""
        return Detokenizer(lambda token_id: _BYTES[token_id] if token_id < 256 else b"", strip_space=False)


def _build_backend(description: dict[str, Any], origin: str) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the library raises no narrower type
        raise ModelRefused(f"{origin}: the tokenizer is damaged ({error}); download it again") from error
    backend.no_padding()
    backend.no_truncation()
    return backend


def _build_encode(description: dict[str, Any], backend: tokenizers.Tokenizer) -> EncodeTexts:
    """Texts to ids without BOS."""
    encode = getattr(backend, "encode_batch_fast", backend.encode_batch)  # since tokenizers 0.20

    def encode_texts(texts: list[str]) -> list[array[int]]:
        return [array("I", encoding.ids) for encoding in encode(texts, add_special_tokens=False)]

    return PieceMemo(encode_texts).encode_batch if can_cut(description) else encode_texts


def _any_of(texts: list[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest first; nothing when there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same value with every string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_texts(item, change) for key, item in value.items()}
    return [_map_texts(item, change) for item in value] if isinstance(value, list) else value
