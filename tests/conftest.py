"""What every test shares: a job database of its own, so that no test meets the user's jobs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_state_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point the default job database into a temporary folder, also for child processes."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    monkeypatch.delenv("GRISTMILL_DATABASE_URL", raising=False)
    return folder


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2_path(repo_root: Path) -> str:
    """The SmolLM2-135M-Instruct GGUF file that `make setup` links; its absence is an error, never a skip."""
    path = repo_root / "models" / "smollm2-135m-instruct.gguf"
    assert path.exists(), f"{path} is missing: run `make setup`"
    return str(path)
