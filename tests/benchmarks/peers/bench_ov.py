"""OpenVINO GenAI as a peer: bench_ov.py MODEL_FOLDER WORKLOADS, with its ContinuousBatchingPipeline.

Environment: PEERS, KV (f16, u8 or bf16), PREC (bf16 or f32), MAXSEQS, MBT, SPLIT, CACHE (GB), PRIME (run the
first row alone, for the others to find its prefix), TAG, ROWS, THREADS. export_ov.sh makes the model folders.
"""

import os
import sys
import time
from functools import partial

import numpy as np
import openvino
import openvino_genai
from common import NUM_THREADS, WARM, load, measure


def build_pipeline(folder: str):
    """The pipeline, and its settings as text."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = int(os.environ.get("CACHE", "4"))
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = int(os.environ.get("MAXSEQS", "256"))
    scheduler.max_num_batched_tokens = int(os.environ.get("MBT", "4096"))
    scheduler.dynamic_split_fuse = bool(int(os.environ.get("SPLIT", "1")))
    properties = {
        "INFERENCE_PRECISION_HINT": os.environ.get("PREC", "bf16"),
        "INFERENCE_NUM_THREADS": NUM_THREADS,
        "PERFORMANCE_HINT": "LATENCY",
    }
    if os.environ.get("KV"):
        properties["KV_CACHE_PRECISION"] = os.environ["KV"]
    settings = (
        f"{properties} cache={scheduler.cache_size}GB prefix_caching max_num_seqs={scheduler.max_num_seqs} "
        f"max_batched={scheduler.max_num_batched_tokens} split_fuse={scheduler.dynamic_split_fuse}"
    )
    return openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties), settings


def computing_dtype() -> str:
    """What the products are computed in: the hint bf16 is ignored, without a word, where the CPU lacks it."""
    wanted = os.environ.get("PREC", "bf16")
    has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "bfloat16" if wanted == "bf16" and has_bf16 else "float32"


def run_rows(pipeline, rows: list[dict]) -> list[list[int]]:
    """Greedy completions of exactly max_tokens each."""
    configs = []
    for row in rows:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = row["max_tokens"], True, False
        configs.append(config)
    prompts = [openvino.Tensor(np.array([row["ids"]], dtype=np.int64)) for row in rows]
    return [list(answer.m_generation_ids[0]) for answer in pipeline.generate(prompts, configs)]


def run_primed(pipeline, rows: list[dict]) -> list[list[int]]:
    """The same; with PRIME the first row alone, for the others to find its prefix."""
    first = 1 if os.environ.get("PRIME") and len(rows) > 1 else 0
    return (run_rows(pipeline, rows[:first]) if first else []) + run_rows(pipeline, rows[first:])


def main() -> None:
    """Load, warm up on eight tokens, then time each workload."""
    folder, workloads = sys.argv[1], sys.argv[2]
    start = time.perf_counter()
    pipeline, settings = build_pipeline(folder)
    load_s = time.perf_counter() - start
    if WARM:
        run_rows(pipeline, [dict(load("C")[0], max_tokens=8)])
    facts = {"dtype": computing_dtype(), "version": openvino_genai.__version__, "load_s": load_s}
    for workload in workloads:
        name, rows = f"openvino-{os.path.basename(folder)}", load(workload)
        measure(name, workload, rows, partial(run_primed, pipeline), **facts, settings=settings)


if __name__ == "__main__":
    main()
