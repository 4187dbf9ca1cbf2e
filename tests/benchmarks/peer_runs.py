"""Which peers there are, what each needs in its environment, and one run of one of them in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kit import HERE, Figures
from peer_environments import FOLDER, environment_python, make_environment

OWN_ENVIRONMENT = "own"
TCMALLOC = "libtcmalloc_minimal.so.4"


class Peer(NamedTuple):
    """A system under one set of settings. workloads: those that it is meant for; note: what the table says of it."""

    name: str
    environment: str | None  # None: Gristmill's own script; OWN_ENVIRONMENT: a peer's, with our Python
    dtype: str  # of the weights
    script: tuple[str, ...]
    settings: Mapping[str, str]
    workloads: str = "ABC"
    computes_in: str = ""  # what its script reports; empty: the dtype of the weights
    note: str = ""


class PeerFailed(Exception):
    """A run ended badly; the message says how."""


OPENVINO_PRECISION = {"float32": "f32", "bfloat16": "bf16"}
CODES = "q4_1"  # the weights as the GGUF file has them, against one that can run them too
DTYPES = (*OPENVINO_PRECISION, CODES)
PEER_NAMES = ("gristmill", "vllm", "openvino", "openvino-primed", "transformers", "llama")


def list_peers(names: list[str], dtypes: list[str]) -> list[Peer]:
    """All peers of these names in each dtype, Gristmill first."""
    known = [peer for dtype in dtypes for peer in (_code_peers() if dtype == CODES else _float_peers(dtype))]
    return [peer for peer in known if peer.name in names]


def _float_peers(dtype: str) -> list[Peer]:
    """Those that compute with the dequantized weights."""
    precision = {"DTYPE": dtype, "PREC": OPENVINO_PRECISION[dtype]}
    # Its cache is in 8 bits unless told otherwise; beside float32 it must be float32.
    openvino = precision | ({"KV": "f32"} if dtype == "float32" else {})
    primed = openvino | {"PRIME": "1", "TAG": "-primed"}
    return [
        Peer("gristmill", None, dtype, ("bench.py", "--dtype", dtype, "--quantization", "none"), {}),
        Peer("vllm", "vllm", dtype, ("peers/bench_vllm.py",), precision),
        Peer("openvino", "openvino", dtype, ("peers/bench_ov.py", "ov-fp16"), openvino),
        # The first row alone, then the others: the user's knowledge of the shared prefix, not the engine's.
        Peer("openvino-primed", "openvino", dtype, ("peers/bench_ov.py", "ov-fp16"), primed, "A"),
        Peer(
            "transformers", "transformers", dtype, ("peers/bench_hf.py", "static"), precision | {"BS": "32"}
        ),
    ]


def _code_peers() -> list[Peer]:
    """Those that compute with the file's own codes. On C both may hold one row only, elsewhere what they like."""
    ours = ("bench.py", "--dtype", "float32", "--quantization", "auto")
    exact = {"computes_in": "float32", "note": "the file's codes, float32 activations and cache"}
    rounded = "the file's codes, 8-bit activations, float16 cache"
    return [
        Peer("gristmill", None, CODES, ours, {}, "AB", **exact),
        Peer("gristmill", None, CODES, (*ours, "--max-num-seqs", "1"), {}, "C", **exact),
        Peer("llama", "llama", CODES, ("peers/bench_llama.py",), {"DTYPE": CODES}, note=rounded),
    ]


def prepare_peer(peer: Peer, work: Path) -> None:
    """Make the peer's environment and what it loads."""
    if peer.environment is not None:
        make_environment(peer.environment)
    if peer.environment == "openvino" and not (work / "ov-fp16" / "openvino_model.xml").exists():
        python = make_environment("openvino-export")
        env = dict(os.environ, PEERS=str(work), PATH=f"{python.parent}:{os.environ['PATH']}")
        subprocess.run(["bash", str(HERE / "peers" / "export_ov.sh"), "fp16"], env=env, check=True)


def preloads(environment: str | None) -> str:
    """The libraries that vLLM wants loaded before it, where they exist; it warns of a loss of speed without."""
    if environment != "vllm":
        return ""
    found = [FOLDER / "vllm" / "lib" / "libiomp5.so", *sorted(Path("/usr/lib").glob(f"*/{TCMALLOC}"))]
    return ":".join(str(path) for path in found if path.exists())


def run_peer(
    peer: Peer, workloads: str, args: argparse.Namespace, *, num_rows: int, timeout_s: float, **more: str
) -> tuple[list[Figures], float]:
    """(one dictionary a workload, seconds of the whole process). args: its model, peers_folder and threads.

    num_rows 0: all. Raises PeerFailed.
    """
    work, threads = args.peers_folder, args.threads
    env = dict(os.environ, **peer.settings, **more, PEERS=str(work), ROWS=str(num_rows), HF_HUB_OFFLINE="1")
    if threads:
        env["THREADS"] = str(threads)
    if libraries := preloads(peer.environment):
        env["LD_PRELOAD"] = libraries
    python, script, *arguments = sys.executable, *peer.script
    if peer.environment is None:
        env["PYTHONPATH"] = str(HERE.parents[1])
        arguments += ["--model", args.model, "--workloads", workloads, "--rows", str(num_rows)]
        arguments += ["--peer-dtype", "none", "--output", os.devnull]
        arguments += ["--threads", str(threads)] if threads else []
    else:
        folders = [str(work / name) for name in arguments]
        arguments = [*(folders if peer.environment == "openvino" else arguments), workloads]
        if peer.environment != OWN_ENVIRONMENT:
            python = str(environment_python(peer.environment))
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        command, start = [python, str(HERE / script), *arguments], time.perf_counter()
        try:
            done = subprocess.run(
                command, env=env, timeout=timeout_s, stdout=subprocess.PIPE, stderr=log, text=True
            )
        except subprocess.TimeoutExpired:
            raise PeerFailed(f"took longer than {timeout_s:.0f} s") from None
        secs = time.perf_counter() - start
        if done.returncode != 0:
            log.seek(0)
            last = next((line for line in reversed(log.read().splitlines()) if line.strip()), "no message")
            raise PeerFailed(f"ended with {done.returncode}: {last.strip()[:300]}")
    figures = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if [line["wl"] for line in figures] != list(workloads):
        raise PeerFailed(f"reported {len(figures)} workloads of {workloads}")
    if any(line["out_tok"] != line.get("want_out", line["out_tok"]) for line in figures):
        raise PeerFailed("a row has not exactly its max_tokens")
    return figures, secs
