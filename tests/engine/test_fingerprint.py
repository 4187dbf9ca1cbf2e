"""The model's fingerprint: equal for equal files, different for whatever changes outputs, and quick."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.engine.checkpoint.fingerprint import fingerprint
from gristmill.engine.errors import ModelRefused
from tests.engine.tiny_models import build_tiny_gguf, build_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama")


def _edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_copy_elsewhere_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    found = fingerprint(str(folder), "float32")
    assert found == fingerprint(str(tmp_path / "copy"), "float32")
    assert len(found) == 32
    assert int(found, 16)


def test_dtype_configuration_tokenizer_template_and_weights_each_change_it(
    folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    seen = {fingerprint(str(copy), "float32"), fingerprint(str(copy), "bfloat16")}
    _edit_json(copy / "config.json", rms_norm_eps=1e-5)
    seen.add(fingerprint(str(copy), "float32"))
    _edit_json(copy / "tokenizer.json", version="1.0 ")
    seen.add(fingerprint(str(copy), "float32"))
    (copy / "chat_template.jinja").write_text("x")
    seen.add(fingerprint(str(copy), "float32"))
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-len(data) // 2 :] = bytes(len(data[-len(data) // 2 :]))
    weights.write_bytes(data)
    seen.add(fingerprint(str(copy), "float32"))
    assert len(seen) == 6


def test_a_gguf_file_has_one_too_and_its_quantization_is_part_of_it(folder: Path, tmp_path: Path) -> None:
    found = {
        fingerprint(str(build_tiny_gguf(folder, tmp_path / f"{kind}.gguf", kind)), "float32")
        for kind in ("F32", "Q8_0", "Q4_1")
    }
    assert len(found) == 3


def test_null_urls_differ_by_their_text() -> None:
    assert fingerprint("null:", "auto") != fingerprint("null:?delay_ms=2", "auto")
    assert fingerprint("null:", "auto") == fingerprint("null:", "auto")


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="no such model"):
        fingerprint(str(tmp_path / "missing"), "auto")


def test_what_reads_headers_and_texts_loads_without_torch(repo_root: Path) -> None:
    names = ("checkpoint.fingerprint", "checkpoint.opening", "text.tokenizer", "text.stop", "text.chat")
    imports = ", ".join(f"gristmill.engine.{name}" for name in names)
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=repo_root).returncode == 0
