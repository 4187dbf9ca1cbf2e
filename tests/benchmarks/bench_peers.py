"""Gristmill and its peers on the same rows in turn: vLLM's CPU build, OpenVINO GenAI, transformers, llama.cpp.

Each runs in an environment of its own (peer_environments.py), once a round, round after round; what counts is the
median of a system's rounds, and the ratio of medians. A peer whose first rows say that it would take too long for all
of them is measured on those, and the table says so. llama.cpp runs the GGUF's own codes, so Gristmill does beside it;
the others, and Gristmill beside them, the dequantized weights. Writes results/peers-cpu.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys

from kit import (
    Figures,
    build_parser,
    check_known,
    load_machine,
    load_workload,
    prepare_peers,
    print_table,
    write_result,
)
from peer_runs import DTYPES, PEER_NAMES, Peer, PeerFailed, list_peers, prepare_peer, run_peer

LOAD_S = 900.0  # the most that loading may take: vLLM compiles the model each time
TRIAL_ROWS = 2
Key = tuple[str, str, str]  # workload, peer, dtype


def num_output(workload: str, num_rows: int) -> int:
    """Tokens that the first num_rows rows of a workload ask for."""
    return sum(row["max_tokens"] for row in load_workload(workload, num_rows))


class Rounds:
    """What was measured so far, and why something was not."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.runs: dict[Key, list[Figures]] = {}
        self.rows: dict[Key, int] = {}  # fewer than asked for, after a slow trial
        self.notes: dict[Key, str] = {}
        self.broken: set[tuple[str, str]] = set()

    def workloads_of(self, peer: Peer) -> str:
        """The workloads wanted of this peer that have not failed."""
        return "".join(w for w in self.args.workloads if w in peer.workloads)

    def run(self, peer: Peer, workloads: str, num_rows: int, timeout_s: float) -> list[Figures]:
        """One run; a failure is noted and the peer is left out from then on."""
        load = os.getloadavg()[0]
        try:
            figures, secs = run_peer(peer, workloads, self.args, num_rows=num_rows, timeout_s=timeout_s)
        except PeerFailed as error:
            print(f"{peer.name} {peer.dtype} on {workloads}: {error}", flush=True)
            for workload in workloads:
                self.notes[workload, peer.name, peer.dtype] = f"failed: {error}"
            self.broken.add((peer.name, peer.dtype))
            return []
        for line in figures:
            if line["dtype"] != (peer.computes_in or peer.dtype):
                self.notes[line["wl"], peer.name, peer.dtype] = f"computes in {line['dtype']} on this CPU"
            line |= {"computes_in": line["dtype"], "load_average": round(load, 1)}
            line |= {"system": peer.name, "dtype": peer.dtype}
            line["process_s"] = round(secs, 1)
            print(f"{line['wl']} {peer.name} {peer.dtype}: {line['out_tok_s']} output tokens/s", flush=True)
        return figures

    def try_out(self, peer: Peer) -> None:
        """Run the first rows, and note which workloads would take too long with all of them."""
        limit_s = self.args.max_run_s
        tried = self.run(peer, self.workloads_of(peer), TRIAL_ROWS, LOAD_S + limit_s)
        for line in tried:
            wanted, done = num_output(line["wl"], self.args.rows), line["out_tok"]
            expected_s = line["secs"] * wanted / done
            if expected_s > limit_s and wanted > done:
                key = (line["wl"], peer.name, peer.dtype)
                self.rows[key] = line["rows"]
                self.runs[key] = [line]
                limits = f"all would take about {expected_s:,.0f} s, the limit is {limit_s:,.0f}"
                notes = [self.notes.get(key, ""), f"only {line['rows']} rows: {limits}"]
                self.notes[key] = "; ".join(note for note in notes if note)
                print(f"{line['wl']} {peer.name} {peer.dtype}: {self.notes[key]}", flush=True)

    def run_round(self, peers: list[Peer]) -> None:
        """Every peer once, with all its workloads in one process."""
        for peer in peers:
            if (peer.name, peer.dtype) in self.broken:
                continue
            full = "".join(w for w in self.workloads_of(peer) if (w, peer.name, peer.dtype) not in self.rows)
            if not full:
                continue
            for line in self.run(peer, full, self.args.rows, LOAD_S + len(full) * 2 * self.args.max_run_s):
                self.runs.setdefault((line["wl"], peer.name, peer.dtype), []).append(line)


def summarize(rounds: Rounds, peers: list[Peer]) -> list[Figures]:
    """Medians, with the ratio of Gristmill's in the same dtype, one dictionary a workload and system."""
    table = []
    for workload in rounds.args.workloads:
        medians = {
            key[1:]: statistics.median(line["out_tok_s"] for line in lines)
            for key, lines in rounds.runs.items()
            if key[0] == workload
        }
        for peer in peers:
            if workload not in peer.workloads:
                continue
            key = (workload, peer.name, peer.dtype)
            line: Figures = {"wl": workload, "system": peer.name, "dtype": peer.dtype}
            if rate := medians.get(key[1:]):
                runs, ours = rounds.runs[key], medians.get(("gristmill", peer.dtype))
                line |= {
                    "rounds": len(runs),
                    "rows": runs[0]["rows"],
                    "out_tok": runs[0]["out_tok"],
                    "out_tok_s": round(rate, 2),
                    "lowest": min(run["out_tok_s"] for run in runs),
                    "highest": max(run["out_tok_s"] for run in runs),
                    "load_s": round(statistics.median(run["load_s"] for run in runs), 1),
                    "peak_gb": max(run["peak_rss_gb"] for run in runs),
                    "gristmill_is": round(ours / rate, 2) if ours else None,
                }
            notes = [peer.note, rounds.notes.get(key, "")]
            table.append(line | {"note": "; ".join(note for note in notes if note)})
    return table


def print_summary(table: list[Figures]) -> None:
    """One line a workload and system."""
    heads = (
        "wl",
        "system",
        "dtype",
        "rows",
        "rounds",
        "out tok/s",
        "from",
        "to",
        "load s",
        "GB",
        "ratio",
        "",
    )
    keys = ("wl", "system", "dtype", "rows", "rounds", "out_tok_s", "lowest", "highest", "load_s", "peak_gb")
    print_table(heads, [[line.get(key) for key in (*keys, "gristmill_is", "note")] for line in table])
    print("ratio: Gristmill's median over the system's, on weights of that dtype; all token counts are exact")


def parse_arguments() -> argparse.Namespace:
    names = "model workloads rows repeat max-run-s peers-folder threads"
    parser = build_parser(__doc__, names, "peers-cpu.json")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="of the weights; q4_1: the file's codes")
    parser.add_argument("--peers", default=",".join(PEER_NAMES))
    args = parser.parse_args()
    check_known(parser, "peers", args.peers.split(","), PEER_NAMES)
    check_known(parser, "dtypes", args.dtypes.split(","), DTYPES)
    check_known(parser, "workloads", args.workloads, "ABC")
    return args


def main() -> None:
    args = parse_arguments()
    machine = load_machine()
    peers = list_peers(args.peers.split(","), args.dtypes.split(","))
    prepare_peers(args.peers_folder, args.model)
    for peer in peers:
        prepare_peer(peer, args.peers_folder)
    rounds = Rounds(args)
    for peer in peers:
        if peer.environment is not None:
            rounds.try_out(peer)
    for number in range(args.repeat):
        print(f"round {number + 1} of {args.repeat}", flush=True)
        rounds.run_round(peers)
    table = summarize(rounds, peers)
    print_summary(table)
    runs = [line for lines in rounds.runs.values() for line in lines]
    write_result(args.output, {"machine": machine, "medians": table, "runs": runs})
    if rounds.broken:
        sys.exit(f"{len(rounds.broken)} systems failed; see the notes")


if __name__ == "__main__":
    main()
