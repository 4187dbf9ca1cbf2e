"""llama.cpp as a peer: bench_llama.py WORKLOADS. Starts llama-server, sends token ids to /completion.

Environment: PEERS, LLAMA_BIN (folder of llama-server), GGUF, NP (slots, 32), CTX (tokens a slot, 1024), UB,
PORT, XARGS (more server arguments), TAG, ROWS, THREADS.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
from common import NUM_THREADS, PEERS, load, report

NUM_SLOTS = int(os.environ.get("NP", "32"))
GGUF = os.environ.get("GGUF", str(PEERS / "smollm2.gguf"))
PORT = int(os.environ.get("PORT", "18533"))
LLAMA_BIN = os.environ.get("LLAMA_BIN", str(PEERS / "llama-bin"))


def server_command() -> list[str]:
    """The server's command line."""
    context = str(NUM_SLOTS * int(os.environ.get("CTX", "1024")))
    threads, micro_batch = str(NUM_THREADS), os.environ.get("UB", "512")
    command = [f"{LLAMA_BIN}/llama-server", "-m", GGUF, "--host", "127.0.0.1", "--port", str(PORT)]
    command += ["-np", str(NUM_SLOTS), "-c", context, "-t", threads, "-tb", threads]
    return [*command, "-b", "2048", "-ub", micro_batch, "-cb", *os.environ.get("XARGS", "").split()]


def ask(path: str, body: dict | None = None) -> dict:
    """One request to the server."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=900) as response:
        return json.loads(response.read())


def complete(row: dict) -> dict:
    """Greedy completion of exactly the row's max_tokens."""
    body = {"prompt": row["ids"], "n_predict": row["max_tokens"], "temperature": 0, "top_k": 1}
    body |= {"ignore_eos": True, "cache_prompt": True, "return_tokens": True, "stream": False}
    return ask("/completion", body)


def wait_until_ready(server: subprocess.Popen) -> None:
    """Poll /health for up to a minute."""
    for _ in range(120):
        if server.poll() is not None:
            sys.exit(f"llama-server ended with {server.returncode}: see {PEERS}/llama-server.log")
        try:
            ask("/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    sys.exit("llama-server was not ready after a minute")


def run_rows(rows: list[dict]) -> tuple[list[list[int]], int]:
    """All rows, from twice as many threads as slots; the tokens and the prompt tokens it evaluated."""
    outs: list[list[int]] = [[] for _ in rows]
    evaluated = [0] * len(rows)
    todo: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def work() -> None:
        while (i := todo.get()) is not None:
            answer = complete(rows[i])
            outs[i], evaluated[i] = answer["tokens"], answer["timings"]["prompt_n"]

    threads = [threading.Thread(target=work) for _ in range(min(len(rows), NUM_SLOTS * 2))]
    for item in [*range(len(rows)), *[None] * len(threads)]:
        todo.put(item)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outs, sum(evaluated)


def main() -> None:
    """Start the server, warm it up, time each workload, stop the server."""
    env = dict(os.environ, LD_LIBRARY_PATH=LLAMA_BIN)
    with open(PEERS / "llama-server.log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(server_command(), env=env, stdout=log, stderr=log)
    try:
        wait_until_ready(server)
        complete({"ids": [5, 6, 7, 8], "max_tokens": 4})
        process = psutil.Process(server.pid)
        for workload in sys.argv[1]:
            rows = load(workload)
            cpu, start = sum(process.cpu_times()[:2]), time.perf_counter()
            outs, num_evaluated = run_rows(rows)
            secs = time.perf_counter() - start
            status = Path(f"/proc/{server.pid}/status").read_text(encoding="ascii")
            peak_kb = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
            report(
                "llama.cpp-" + os.environ.get("TAG", f"{os.path.basename(GGUF)}-np{NUM_SLOTS}"),
                workload,
                rows,
                outs,
                secs,
                cpu_util=round((sum(process.cpu_times()[:2]) - cpu) / secs / NUM_THREADS, 2),
                server_rss_gb=round(int(peak_kb) / 2**20, 2),
                prompt_evaluated=num_evaluated,
                settings=" ".join(server_command()[7:]),
            )
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
