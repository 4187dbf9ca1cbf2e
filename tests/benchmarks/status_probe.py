"""Asks for a job's status again and again while it runs: status_probe.py DATABASE_URL OUTPUT.

Ends when its standard input ends, and prints how long the queries took as one JSON line.
"""

from __future__ import annotations

import json
import select
import sys
import time

from gristmill.jobs.errors import JobsError
from gristmill.jobs.store.store import Store, open_store

PERIOD_S = 0.25


def input_ended(timeout_s: float) -> bool:
    """Wait that long for the end of standard input."""
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return bool(ready)


def measure(store: Store, output: str) -> list[float]:
    """Milliseconds of every status query, from the job's first appearance on."""
    times = []
    while not input_ended(PERIOD_S):
        job = store.jobs.find(output)
        if job is None:
            continue
        start = time.perf_counter()
        store.jobs.status(job.job_id)
        times.append((time.perf_counter() - start) * 1000)
    return times


def main() -> None:
    """Open the store once the run has made it, then measure."""
    while True:
        try:
            store = open_store(sys.argv[1])
            break
        except JobsError:  # the run is creating it at this moment
            if input_ended(PERIOD_S):
                sys.exit("the database never opened")
    times = sorted(measure(store, sys.argv[2]))
    worst, middle = (round(times[-1], 1), round(times[len(times) // 2], 1)) if times else (None, None)
    print(json.dumps({"status_queries": len(times), "status_median_ms": middle, "status_max_ms": worst}))


if __name__ == "__main__":
    main()
