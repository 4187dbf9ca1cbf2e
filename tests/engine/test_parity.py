"""The text is right: our tokens are transformers' tokens, whatever the batcher does with the rows."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers

from gristmill.engine.measure.scoring import Forced, Scorer
from tests.engine.parity import Oracle, generate, load_engine, rebuild
from tests.engine.tiny_models import build_tiny_model

# Every pair of values of {prefix cache} x {chunk} x {preemption} x {alone, batch} occurs in these.
PAIRWISE = [
    (True, 256, False, False),
    (True, 16, True, True),
    (False, 16, False, False),
    (False, 256, True, True),
    (True, 256, False, True),
    (False, 16, True, False),
]
SLOW_PATHS = {
    "none": "running on torch's own kernels: steps are slower than with the C++ kernels",
    "avx2": "no AVX512 in use: the AVX2 kernels run, in float32 arithmetic",
}
WORKLOAD = Path(__file__).parent.parent / "benchmarks" / "workload.jsonl"


def test_the_settings_cover_every_pair():
    factors = list(zip(*PAIRWISE, strict=True))
    values = [(True, False), (16, 256), (True, False), (True, False)]
    for i in range(4):
        for j in range(i):
            assert set(zip(factors[i], factors[j], strict=True)) == set(product(values[i], values[j]))


def workload_prompts(lengths):
    """Prompts of these lengths from the benchmark's texts; every other one begins with the shared instructions."""
    rows = [json.loads(line)["ids"] for line in WORKLOAD.read_text().splitlines()]
    shared = rows[0][:471]
    texts = [t for ids in rows for t in (ids[471:] if ids[:471] == shared else ids)]
    prompts, at = [], 0
    for i, length in enumerate(lengths):
        head = shared[: length * 2 // 3] if i % 2 else []
        prompts.append(head + texts[at : at + length - len(head)])
        at += length - len(head)
    assert [len(p) for p in prompts] == list(lengths), "the texts are used up"
    return prompts


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load_engine(smollm2_path)


@pytest.fixture(scope="module")
def smollm2_oracle(smollm2_path):
    """transformers on weights that the gguf package dequantized."""
    path = Path(smollm2_path).resolve()
    return Oracle(
        transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    )


@pytest.mark.parametrize("prefix_cache, chunk, preempt, alone", PAIRWISE)
def test_smollm2_equals_transformers(smollm2, smollm2_oracle, prefix_cache, chunk, preempt, alone):
    prompts = workload_prompts([5, 90, 16, 96, 33, 120, 47, 75])
    engine = rebuild(smollm2, chunk=chunk, prefix_cache=prefix_cache)
    outputs = generate(engine, prompts, 16, alone=alone, preempt=preempt)
    smollm2_oracle.check_equal(prompts, outputs)
    assert (engine.counters().num_cached_tokens > 0) == (prefix_cache and not alone)


@pytest.mark.parametrize("step_tokens", [1, 64])
def test_codes_give_the_logits_of_the_dequantized_weights(smollm2_path, smollm2_oracle, step_tokens):
    engine = load_engine(smollm2_path, max_num_seqs=1, max_num_batched_tokens=step_tokens)
    if engine.info.cpu_kernels != "none":
        assert engine.info.linear_bits <= 5.0 and engine.info.head_bits == 8.5  # no copy in numbers
    [ids] = workload_prompts([90])
    logits = engine.runner.model.logits(Scorer(engine, len(ids)).hidden([Forced(ids[:30], ids[30:])]))
    with torch.inference_mode():
        expected = smollm2_oracle.model(torch.tensor([ids])).logits[0, 29:-1]
    error = float((logits - expected).abs().max() / expected.abs().max())
    print(f"steps of {step_tokens} tokens: logits are {error:.1e} of the largest away")
    assert error <= 1e-4


@pytest.mark.parametrize("cap", ["none", "avx2"])
def test_a_capped_cpu_is_named_once_and_gives_the_same_text(smollm2_path, smollm2_oracle, caplog, cap):
    engine = load_engine(smollm2_path, max_num_batched_tokens=64, cpu_kernels=cap)
    used = engine.info.cpu_kernels
    assert used in {"none", cap}  # none for both where there is no compiler
    assert [r.message for r in caplog.records].count(SLOW_PATHS[used]) == 1
    prompts = workload_prompts([90, 96, 120])
    smollm2_oracle.check_equal(prompts, generate(engine, prompts, 12))


def test_a_cache_too_small_for_the_batch_preempts_and_keeps_the_text(smollm2, smollm2_oracle, monkeypatch):
    prompts = workload_prompts([40, 50, 60, 70])
    engine = rebuild(smollm2, chunk=64, prefix_cache=True, num_blocks=13)
    scheduler = engine.scheduler  # looks no further than this step, so that memory does run out
    monkeypatch.setattr(
        scheduler, "_will_fit", lambda own, now, remaining, memory: scheduler._can_allocate(now)
    )
    smollm2_oracle.check_equal(prompts, generate(engine, prompts, 40))
    assert engine.counters().num_preemptions > 0


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("prefix_cache, chunk, preempt, alone", PAIRWISE)
def test_smollm2_equals_transformers_at_length(smollm2, smollm2_oracle, prefix_cache, chunk, preempt, alone):
    prompts = workload_prompts([5 + 695 * i // 63 for i in range(64)])
    engine = rebuild(smollm2, chunk=chunk, prefix_cache=prefix_cache, num_blocks=1024)
    outputs = generate(engine, prompts, 64, alone=alone, preempt=preempt)
    smollm2_oracle.check_equal(prompts, outputs)


def check_bfloat16(path, oracle, prompts, max_tokens):
    engine = load_engine(path, "bfloat16", max_num_batched_tokens=64)
    share, gap = oracle.agreement(prompts, generate(engine, prompts, max_tokens))
    print(f"bfloat16: {share:.1%} of tokens are float32's argmax on our history; worst gap {gap:.3f}")
    assert share >= 0.95
    assert gap <= 0.2


def test_bfloat16_follows_float32_on_its_own_history(smollm2_path, smollm2_oracle):
    """Over 1,056 tokens: of 128, two more or less decide. transformers in bfloat16 is at 98.4% of them too."""
    check_bfloat16(smollm2_path, smollm2_oracle, workload_prompts([30 + 3 * i for i in range(24)]), 44)


@pytest.mark.long
def test_bfloat16_follows_float32_at_length(smollm2_path, smollm2_oracle):
    check_bfloat16(smollm2_path, smollm2_oracle, workload_prompts([30 + 5 * i for i in range(24)]), 16)


ARCHITECTURES = {
    "llama with scaled rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama with yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama with linear rope and tied embeddings": (
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "mistral": ("mistral", {}),
    "mistral with a window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


@pytest.mark.parametrize("architecture, overrides", ARCHITECTURES.values(), ids=list(ARCHITECTURES))
def test_every_architecture_equals_transformers(tmp_path, architecture, overrides):
    folder = build_tiny_model(tmp_path / "model", architecture, **overrides)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    oracle = Oracle(reference)
    loaded = load_engine(str(folder), num_kv_blocks=64)
    shared = [3 + i % 300 for i in range(50)]
    prompts = [[*shared[: 7 * i], *range(10 + i, 40 + i)] for i in range(8)]
    for prefix_cache, chunk, preempt, alone in PAIRWISE:
        engine = rebuild(loaded, chunk=chunk, prefix_cache=prefix_cache, num_blocks=64)
        outputs = generate(engine, prompts, 16, alone=alone, preempt=preempt)
        oracle.check_equal(prompts, outputs)


def test_qwen3_in_bfloat16_follows_float32(tmp_path):
    folder = build_tiny_model(tmp_path / "model", "qwen3", head_dim=32)
    oracle = Oracle(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    prompts = [list(range(10 + i, 50 + 2 * i)) for i in range(8)]
    check_bfloat16(str(folder), oracle, prompts, 16)
