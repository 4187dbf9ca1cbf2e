"""How far bfloat16 strays from float32: Gristmill's tokens in bfloat16, judged by transformers in float32.

Each output is fed back whole (teacher forcing): a token counts when it is float32's argmax on our own history, and the
gap says by how much a logit it lost where it is not. At least 95% must agree, and no gap may exceed 0.2.
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path

import torch
from kit import build_parser, load_machine, load_workload, prepare_peers, write_result
from transformers import AutoModelForCausalLM

from gristmill.engine.build import build_engine
from gristmill.engine.config import EngineOptions
from gristmill.engine.request import Request, SamplingParams

MIN_AGREEMENT, MAX_GAP = 0.95, 0.2


def generate(model: str, dtype: str, rows: list[dict], cpu_kernels: str) -> list[list[int]]:
    """Greedy tokens of the rows, all of them at once as in a job."""
    engine = build_engine(model, EngineOptions(dtype=dtype, quantization="none", cpu_kernels=cpu_kernels))
    sampling = [SamplingParams(max_tokens=row["max_tokens"], ignore_eos=True) for row in rows]
    engine.add([Request(i, array("I", row["ids"]), sampling[i]) for i, row in enumerate(rows)])
    outputs: dict[int, list[int]] = {}
    while engine.has_work():
        for completion in engine.step():
            outputs[completion.request_id] = list(completion.token_ids)
    for i, row in enumerate(rows):
        if len(outputs[i]) != row["max_tokens"]:
            sys.exit(f"row {i}: {len(outputs[i])} tokens, expected {row['max_tokens']}")
    return [outputs[i] for i in range(len(rows))]


@torch.inference_mode()
def judge(folder: Path, rows: list[dict], outputs: list[list[int]]) -> tuple[float, list[float]]:
    """(share of tokens that are the argmax, the gaps of the others, largest first)."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    gaps: list[float] = []
    for row, output in zip(rows, outputs, strict=True):
        ids = torch.tensor([[*row["ids"], *output]])
        logits = model(ids, logits_to_keep=len(output) + 1).logits[0, :-1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        lost = (logits.max(-1).values - chosen)[logits.argmax(-1) != torch.tensor(output)]
        gaps += lost.tolist()
    return 1 - len(gaps) / sum(map(len, outputs)), sorted(gaps, reverse=True)


def main() -> None:
    parser = build_parser(__doc__, "model dtype workloads rows peers-folder", "teacher-forced.json")
    parser.add_argument("--cpu-kernels", default="auto", choices=["auto", "amx", "avx512", "avx2", "none"])
    parser.set_defaults(dtype="bfloat16", workloads="AB", rows=64)
    args = parser.parse_args()
    prepare_peers(args.peers_folder, args.model)
    # The folder's weights are the file's rounded to bfloat16: both sides start from the same numbers.
    folder, lines, missed = args.peers_folder / "smollm2-hf", [], []
    for workload in args.workloads:
        rows = load_workload(workload, args.rows)
        outputs = generate(str(folder), args.dtype, rows, args.cpu_kernels)
        agreement, gaps = judge(folder, rows, outputs)
        worst = gaps[0] if gaps else 0.0
        num_tokens = sum(map(len, outputs))
        print(
            f"{workload}: {agreement:.2%} of {num_tokens} tokens in {args.dtype} are float32's argmax "
            f"(goal {MIN_AGREEMENT:.0%}), the worst gap is {worst:.3f} (goal {MAX_GAP})",
            flush=True,
        )
        if agreement < MIN_AGREEMENT or worst > MAX_GAP:
            missed.append(workload)
        line = {"wl": workload, "rows": len(rows), "tokens": num_tokens, "agreement": round(agreement, 4)}
        lines.append(
            line | {"worst_gap": round(worst, 4), "largest_gaps": [round(gap, 4) for gap in gaps[:10]]}
        )
    result = {"machine": load_machine(), "dtype": args.dtype, "cpu_kernels": args.cpu_kernels}
    write_result(args.output, result | {"workloads": lines})
    if missed:
        sys.exit(f"goals missed on {', '.join(missed)}")


if __name__ == "__main__":
    main()
