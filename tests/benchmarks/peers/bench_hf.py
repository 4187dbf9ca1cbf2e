"""transformers as a peer: bench_hf.py static|cb WORKLOADS.

static: generate() over left-padded batches of BS rows, sorted by length; cb: its own continuous batching.
Environment: PEERS, DTYPE (bfloat16), BS (32), SORT (1), ROWS, NBLOCKS and MBT (cb only), TAG, THREADS.
"""

import os
import sys
import time
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from common import HF_FOLDER, NUM_THREADS, WARM, load, measure
from transformers import AutoModelForCausalLM, GenerationConfig

PAD = 2
DTYPE = os.environ.get("DTYPE", "bfloat16")


def run_static(model, rows: list[dict], batch_size: int) -> list[list[int]]:
    """Batches of rows of like length; a batch runs to its longest row, the surplus is cut after."""
    outs: list[list[int]] = [[] for _ in rows]
    order = list(range(len(rows)))
    if int(os.environ.get("SORT", "1")):
        order.sort(key=lambda i: (rows[i]["max_tokens"], len(rows[i]["ids"])))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        width = max(len(rows[i]["ids"]) for i in batch)
        ids = torch.full((len(batch), width), PAD)
        mask = torch.zeros((len(batch), width), dtype=torch.long)
        for k, i in enumerate(batch):
            prompt = rows[i]["ids"]
            ids[k, width - len(prompt) :] = torch.tensor(prompt)
            mask[k, width - len(prompt) :] = 1
        config = GenerationConfig(
            max_new_tokens=max(rows[i]["max_tokens"] for i in batch),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=PAD,
            use_cache=True,
        )
        with torch.inference_mode():
            tokens = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        for k, i in enumerate(batch):
            outs[i] = tokens[k, width : width + rows[i]["max_tokens"]].tolist()
    return outs


def run_continuous(model, rows: list[dict]) -> list[list[int]]:
    """transformers' own continuous batching; one output length for all, whose surplus is cut after."""
    config = GenerationConfig(
        max_new_tokens=max(row["max_tokens"] for row in rows),
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=PAD,
        num_blocks=int(os.environ.get("NBLOCKS", "2048")),
        max_batch_tokens=int(os.environ.get("MBT", "2048")),
    )
    results = model.generate_batch(inputs=[row["ids"] for row in rows], generation_config=config)
    keys = sorted(results, key=lambda key: int(key.split("_")[-1]))
    tokens = [results[key].generated_tokens for key in keys]
    return [row_tokens[: row["max_tokens"]] for row_tokens, row in zip(tokens, rows, strict=True)]


def main() -> None:
    """Load, warm up on four tokens, then time each workload."""
    mode, workloads = sys.argv[1], sys.argv[2]
    torch.set_num_threads(NUM_THREADS)
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        HF_FOLDER, dtype=getattr(torch, DTYPE), attn_implementation="sdpa"
    ).eval()
    load_s = time.perf_counter() - start
    if WARM:
        run_static(model, [dict(load("C")[0], max_tokens=4)], 1)
    for workload in workloads:
        size = 1 if workload == "C" else int(os.environ.get("BS", "32"))
        name, settings, run = f"transformers-{mode}-{DTYPE}", "generate_batch", partial(run_continuous, model)
        if mode == "static":
            name, settings = f"{name}-bs{size}", f"sdpa, left-padded, sorted, batch {size}"
            run = partial(run_static, model, batch_size=size)
        versions = f"{transformers.__version__} torch {torch.__version__}"
        facts = {"dtype": DTYPE, "load_s": load_s, "version": versions, "settings": settings}
        measure(name, workload, load(workload), run, **facts)


if __name__ == "__main__":
    main()
