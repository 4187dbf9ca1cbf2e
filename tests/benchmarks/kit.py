"""What the benchmarks share: their options and result files, the machine, the workloads, the peers' work folder."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers.common import read_workload

from gristmill.worker.show.tables import build_table, to_text

HERE = Path(__file__).resolve().parent
GRISTMILL = (sys.executable, "-c", "from gristmill.worker.cli.main import main; main()")
PREPARE_TIMEOUT_S = 3600.0
Figures = dict[str, Any]
OPTIONS: dict[str, Figures] = {
    "model": {"default": "models/smollm2-135m-instruct.gguf", "help": "GGUF file of SmolLM2"},
    "dtype": {"default": "auto", "choices": ["auto", "bfloat16", "float32"]},
    "workloads": {"default": "ABC"},
    "rows": {"type": int, "default": 0, "help": "only the first rows of each workload; 0: all"},
    "repeat": {"type": int, "default": 3, "help": "rounds"},
    "max-run-s": {"type": float, "default": 1800.0, "help": "the most one workload may take a peer"},
    "threads": {"type": int, "help": "default: all cores"},
    "peers-folder": {
        "type": lambda text: Path(text).resolve(),
        "default": os.environ.get("PEERS", "peers-work"),
    },
}


def build_parser(doc: str | None, names: str, output: str = "") -> argparse.ArgumentParser:
    """A parser with these of OPTIONS, and --output where there is a result file."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name in names.split():
        parser.add_argument(f"--{name}", **OPTIONS[name])
    if output:
        parser.add_argument("--output", type=Path, default=HERE / "results" / output)
    return parser


def check_known(
    parser: argparse.ArgumentParser, kind: str, given: Iterable[str], known: Iterable[str]
) -> None:
    """End with the usage unless all that were given are known."""
    if unknown := set(given) - set(known):
        parser.error(f"unknown {kind} {', '.join(sorted(unknown))}: choose from {', '.join(known)}")


def write_result(path: Path, result: Figures) -> None:
    """The result file, and where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"written: {os.path.relpath(path)}", flush=True)


def print_table(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    """One line each, - for what is not known."""
    rows = [["-" if cell is None else str(cell) for cell in line] for line in lines]
    print("\n" + to_text(build_table(heads, rows, right=True)))


def load_workload(name: str, num_rows: int) -> list[Figures]:
    """The rows of one workload, the first num_rows of them unless that is 0."""
    return read_workload(HERE, name, num_rows)


def load_machine() -> Figures:
    """What the figures were measured on."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    flags = set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": [flag for flag in wanted if flag in flags],
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "load_average_before": round(os.getloadavg()[0], 1),
    }


def prepare_peers(folder: Path, model: str) -> None:
    """Fill the peers' work folder: the workload, the model file, the model in Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(HERE / "workload.jsonl", folder / "workload.jsonl")
    link, target = folder / "smollm2.gguf", Path(model).resolve()
    if not link.exists() or link.resolve() != target:
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        shutil.rmtree(folder / "smollm2-hf", ignore_errors=True)
    if not (folder / "smollm2-hf" / "model.safetensors").exists():
        command = [sys.executable, str(HERE / "prepare_model.py"), str(link), str(folder / "smollm2-hf")]
        subprocess.run(command, check=True, timeout=PREPARE_TIMEOUT_S, stdout=subprocess.DEVNULL)
