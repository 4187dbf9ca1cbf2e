"""The two kinds of tokenizer that the engine's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.tiny_models import LLAMA2_TEMPLATE, build_byte_level_tokenizer, build_metaspace_tokenizer


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte_level")
    build_byte_level_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metaspace")
    build_metaspace_tokenizer(folder, LLAMA2_TEMPLATE)
    return folder
