"""The models of a worker: by option, by folder, from S3; refused in one line when they can't be run."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from examples.cluster.servers import S3Server
from gristmill.engine.checkpoint.fingerprint import fingerprint
from gristmill.engine.checkpoint.opening import load_checkpoint, resolve_dtype
from gristmill.engine.config import EngineOptions
from gristmill.engine.errors import ModelRefused
from gristmill.jobs.errors import RefusedError, SourceUnavailable
from gristmill.jobs.records import ModelOffer
from gristmill.jobs.storage.s3.client import s3_client
from gristmill.jobs.storage.s3.reader import copy_object
from gristmill.worker.serve.catalog import Catalog, CatalogEntry, load_catalog
from gristmill.worker.serve.model_cache import ModelCache
from tests.engine.tiny_models import build_tiny_gguf, build_tiny_model
from tests.s3_proxy import Fault, s3_proxy_before


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Hugging Face model `tiny` and its GGUF twin `twin.gguf`."""
    home = tmp_path_factory.mktemp("models")
    build_tiny_model(home / "tiny-0.5", "llama")
    build_tiny_gguf(home / "tiny-0.5", home / "twin.gguf")
    return home


def upload(s3_root: str, files: dict[str, Path]) -> None:
    for key, path in files.items():
        s3_client().put_object(Bucket=s3_root.removeprefix("s3://"), Key=key, Body=path.read_bytes())


def test_a_null_model_has_one_entry_for_every_dtype() -> None:
    catalog = load_catalog(["slow=null:?delay_ms=2"])
    (entry,) = catalog.entries()
    expected = fingerprint("null:?delay_ms=2", "float32")
    assert entry == CatalogEntry("slow", "float32", ("auto", "float32", "bfloat16"), expected)
    assert (catalog.names, catalog.path("slow")) == (("slow",), "null:?delay_ms=2")
    assert catalog.offer(entry) == ModelOffer("slow", entry.accepts, entry.fingerprint)


def test_a_model_has_an_entry_for_auto_and_one_for_the_other_dtype(tiny: Path) -> None:
    catalog = load_catalog([f"t={tiny / 'tiny-0.5'}"])
    usual, other = catalog.entries()
    assert (usual.dtype, usual.accepts) == (resolve_dtype("auto"), ("auto", resolve_dtype("auto")))
    assert {usual.dtype, other.dtype} == {"float32", "bfloat16"}
    assert other.accepts == (other.dtype,)
    for entry in (usual, other):
        assert entry.fingerprint == fingerprint(str(tiny / "tiny-0.5"), entry.dtype)


def test_a_workers_settings_are_part_of_the_fingerprints(tiny: Path) -> None:
    model = [f"t={tiny / 'tiny-0.5'}"]
    plain = load_catalog(model)
    packed = load_catalog(model, engine_options=EngineOptions(quantization="int8"))
    for a, b in zip(plain.entries(), packed.entries(), strict=True):
        assert a.fingerprint != b.fingerprint
        packed.check_unchanged(b)
        with pytest.raises(ModelRefused, match="changed"):
            packed.check_unchanged(a)


def test_a_folder_gives_its_gguf_files_and_model_folders_by_name(tiny: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(tiny, home)
    (home / "notes.txt").write_text("no model")
    (home / ".hidden.gguf").write_text("no model")
    (home / "empty").mkdir()
    catalog = load_catalog(["load=null:"], [str(home)])
    assert catalog.names == ("load", "tiny-0.5", "twin")
    assert catalog.path("twin") == str(home / "twin.gguf")
    assert len(catalog.entries()) == 5


def test_a_relative_path_and_a_tilde_become_absolute(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny)
    assert load_catalog(["a=twin.gguf"]).path("a") == str(tiny / "twin.gguf")
    monkeypatch.setenv("HOME", str(tiny))
    assert load_catalog(["a=~/twin.gguf"]).path("a") == str(tiny / "twin.gguf")


@pytest.mark.parametrize(
    ("options", "folders", "words"),
    [
        ([], [], "no model to offer"),
        (["null:"], [], "NAME=PATH"),
        (["=null:"], [], "NAME=PATH"),
        (["a="], [], "NAME=PATH"),
        (["a b=null:"], [], "'a b'"),
        (["-a=null:"], [], "'-a'"),
        (["é=null:"], [], "'é'"),
        (["a\n=null:"], [], "name of the model"),
        (["a" * 101 + "=null:"], [], "100 at most"),
        (["a=null:", "a=null:?delay_ms=1"], [], "two models are named a"),
        ([], ["/no/such/folder"], "/no/such/folder can't be read"),
    ],
)
def test_options_that_name_no_model_are_refused(options: list[str], folders: list[str], words: str) -> None:
    with pytest.raises(RefusedError) as refusal:
        load_catalog(options, folders)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="holds no model"):
        load_catalog([], [str(tmp_path)])


def test_a_model_that_cannot_be_run_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes((tiny / "twin.gguf").read_bytes()[:500])
    for options, folders in ([[f"a={tmp_path}/broken.gguf"], []], [[], [str(tmp_path)]]):
        with pytest.raises(ModelRefused, match=r"broken\.gguf"):
            load_catalog(options, folders)
    for place in (str(tmp_path / "missing.gguf"), "null:?delay_ms=soon"):
        with pytest.raises(ModelRefused):
            load_catalog([f"a={place}"])


def test_weights_that_changed_since_the_start_are_not_loaded_under_the_old_fingerprint(
    tiny: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny / "tiny-0.5", tmp_path / "m")
    catalog = Catalog({"m": str(tmp_path / "m")})
    for entry in catalog.entries():
        catalog.check_unchanged(entry)
    build_tiny_model(tmp_path / "m", "llama", intermediate_size=112)
    for entry in catalog.entries():
        with pytest.raises(ModelRefused, match="start the worker again"):
            catalog.check_unchanged(entry)


def test_a_gguf_and_a_folder_come_from_s3_by_option(tiny: Path, s3_root: str, tmp_path: Path) -> None:
    folder = tiny / "tiny-0.5"
    upload(s3_root, {f"m/tiny/{path.name}": path for path in folder.iterdir()})
    upload(s3_root, {"m/twin.gguf": tiny / "twin.gguf", "m/tiny/onnx/model.json": folder / "config.json"})
    cache = ModelCache(tmp_path / "cache")
    catalog = load_catalog([f"a={s3_root}/m/tiny/", f"b={s3_root}/m/twin.gguf"], cache=cache)
    local = load_catalog([f"a={folder}", f"b={tiny / 'twin.gguf'}"])
    assert catalog.entries() == local.entries()
    assert Path(catalog.path("b")).name == "twin.gguf"
    assert not (Path(catalog.path("a")) / "onnx").exists()
    load_checkpoint(catalog.path("a"))


def test_a_prefix_in_s3_gives_its_models(tiny: Path, s3_root: str, tmp_path: Path) -> None:
    upload(s3_root, {f"m/tiny-0.5/{path.name}": path for path in (tiny / "tiny-0.5").iterdir()})
    upload(
        s3_root, {"m/twin.gguf": tiny / "twin.gguf", "m/data/rows.json": tiny / "tiny-0.5" / "config.json"}
    )
    for uri in (f"{s3_root}/m", f"{s3_root}/m/"):
        assert load_catalog([], [uri], ModelCache(tmp_path)).names == ("tiny-0.5", "twin")


def test_a_copy_is_made_once_and_again_when_the_model_changes(
    tiny: Path, s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    uri = f"{s3_root}/twin.gguf"
    upload(s3_root, {"twin.gguf": tiny / "twin.gguf"})
    first = ModelCache().fetch(uri)
    assert first.is_relative_to(tmp_path / "gristmill" / "models")
    before = first.stat()
    assert ModelCache().fetch(uri) == first
    assert first.stat() == before
    other = tmp_path / "other.gguf"
    other.write_bytes((tiny / "twin.gguf").read_bytes() + b"\0")
    upload(s3_root, {"twin.gguf": other})
    second = ModelCache().fetch(uri)
    assert second != first
    assert second.read_bytes() == other.read_bytes()


def test_several_processes_at_once_make_one_copy(tiny: Path, s3_root: str, tmp_path: Path) -> None:
    upload(s3_root, {"twin.gguf": tiny / "twin.gguf"})
    with ThreadPoolExecutor(4) as pool:
        [place] = set(pool.map(ModelCache(tmp_path).fetch, [f"{s3_root}/twin.gguf"] * 4))
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [place.parent]


def test_what_a_killed_process_left_half_copied_is_replaced(tiny: Path, s3_root: str, tmp_path: Path) -> None:
    upload(s3_root, {"twin.gguf": tiny / "twin.gguf"})
    place = ModelCache(tmp_path).fetch(f"{s3_root}/twin.gguf")
    half = place.parent.with_suffix(".part")
    os.rename(place.parent, half)
    place_in_half = half / place.name
    place_in_half.write_bytes(b"half")
    assert (
        ModelCache(tmp_path).fetch(f"{s3_root}/twin.gguf").read_bytes() == (tiny / "twin.gguf").read_bytes()
    )
    assert not half.exists()


@pytest.mark.parametrize(
    ("fault", "told"), [(Fault.TRUNCATE, "can't reach"), (Fault.FLIP, "did not come whole in 5 tries")]
)
def test_a_body_that_came_damaged_is_asked_for_again(
    tiny: Path,
    s3_server: S3Server,
    s3_root: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    told: str,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between tries
    upload(s3_root, {"twin.gguf": tiny / "twin.gguf"})
    with s3_proxy_before(s3_server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.first(2, fault, "GET", "twin.gguf")
        found = ModelCache(tmp_path / "a").fetch(f"{s3_root}/twin.gguf")
        assert found.read_bytes() == (tiny / "twin.gguf").read_bytes()
        proxy.choose = lambda method, path: fault if method == "GET" and "twin.gguf" in path else None
        with pytest.raises(SourceUnavailable, match=told):
            ModelCache(tmp_path / "b").fetch(f"{s3_root}/twin.gguf")
    assert [path.suffix for path in (tmp_path / "b").iterdir()] == [".lock"]


def test_a_model_that_changes_while_it_is_copied_is_refused(
    tiny: Path, s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(s3_root, {"twin.gguf": tiny / "twin.gguf"})

    def replace_first(*args: Any) -> Any:
        upload(s3_root, {"twin.gguf": tiny / "tiny-0.5" / "config.json"})
        return copy_object(*args)

    monkeypatch.setattr("gristmill.worker.serve.model_cache.copy_object", replace_first)
    with pytest.raises(RefusedError, match="changed while it was copied"):
        ModelCache(tmp_path).fetch(f"{s3_root}/twin.gguf")
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_model_that_is_not_in_s3_is_refused(s3_root: str, tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    for uri in (f"{s3_root}/none.gguf", f"{s3_root}/none", "s3://no-such-bucket-here/m.gguf"):
        with pytest.raises(RefusedError, match=r"s3://"):
            load_catalog([f"a={uri}"], cache=cache)
    for uri in (f"{s3_root}/none", "s3://no-such-bucket-here/m"):
        with pytest.raises(RefusedError, match=r"s3://"):
            load_catalog([], [uri], cache)


def test_a_cache_that_cannot_be_written_is_refused(tiny: Path, s3_root: str, tmp_path: Path) -> None:
    upload(s3_root, {"twin.gguf": tiny / "twin.gguf"})
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match="XDG_CACHE_HOME"):
        ModelCache(tmp_path / "file" / "cache").fetch(f"{s3_root}/twin.gguf")
