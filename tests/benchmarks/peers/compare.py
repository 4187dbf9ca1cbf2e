"""Compares the tokens of the peers: compare.py [REFERENCE]. Reads what their scripts left in PEERS/out.

Equality of greedy tokens means something in float32 only; in bfloat16 it measures rounding.
"""

import json
import sys

from common import PEERS


def shared_length(left: list[int], right: list[int], limit: int = 16) -> int:
    """How many of the first `limit` tokens agree before the first difference."""
    pairs = zip(left[:limit], right[:limit], strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(limit, len(left), len(right)))


def main() -> None:
    """One line for every output beside the reference's."""
    reference_name = sys.argv[1] if len(sys.argv) > 1 else "transformers-static-float32"
    for workload in "ABC":
        found = sorted((PEERS / "out").glob(f"{workload}-{reference_name}*.json"))
        if not found:
            continue
        reference = json.loads(found[0].read_text(encoding="utf-8"))
        for path in sorted((PEERS / "out").glob(f"{workload}-*.json")):
            outs = json.loads(path.read_text(encoding="utf-8"))[: len(reference)]
            pairs = [pair for pair in zip(outs, reference, strict=False) if all(pair)]
            if path == found[0] or not pairs:
                continue
            first = sum(a[0] == b[0] for a, b in pairs) / len(pairs)
            head = sum(shared_length(a, b) / min(16, len(b)) for a, b in pairs) / len(pairs)
            whole = sum(a == b for a, b in pairs) / len(pairs)
            name = path.stem[2:]
            agreement = f"first token {first:.3f}, of 16 {head:.3f}, all {whole:.3f}"
            print(f"{workload} {name}: {len(pairs)} rows, {agreement}")


if __name__ == "__main__":
    main()
