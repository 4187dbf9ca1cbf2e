"""Runs one loaded model under many engine settings, and holds its tokens against transformers in float32."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import replace

import torch

from gristmill.engine.batch.scheduler import Scheduler
from gristmill.engine.build import build_engine
from gristmill.engine.config import BLOCK_SIZE, EngineOptions
from gristmill.engine.engine import Engine
from gristmill.engine.model.runner import ModelRunner
from gristmill.engine.request import Request, SamplingParams

PREEMPT_AT = (3, 7, 12)  # steps after which the youngest loses its blocks, when a test forces it
TIE_GAP = 1e-4  # two logits closer than this are a tie, and either token is right


def load_engine(model: str, dtype="float32", **options) -> Engine:
    """An engine for tests: small cache, small warm-up."""
    settings = dict(num_kv_blocks=512, max_num_batched_tokens=256) | options
    return build_engine(model, EngineOptions(dtype=dtype, **settings))


def rebuild(engine: Engine, *, chunk: int, prefix_cache: bool, num_blocks: int = 512) -> Engine:
    """The same weights and kernels with another batcher and a fresh cache."""
    info = engine.info
    cache = engine.runner.cache.like(num_blocks)
    limit = min(info.context_size, num_blocks * BLOCK_SIZE)
    max_num_seqs = min(32, chunk)
    return Engine(
        ModelRunner(engine.runner.model, cache),
        Scheduler(num_blocks, max_num_seqs, chunk, prefix_cache, limit),
        engine.tokenizer,
        replace(info, max_request_tokens=limit, max_num_seqs=max_num_seqs, max_num_batched_tokens=chunk),
    )


def generate(engine: Engine, prompts, max_tokens, *, alone=False, preempt=False, **sampling):
    """Greedy tokens of each prompt, end of text ignored; preempt: the youngest loses its blocks now and then."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    requests = [Request(i, array("I", p), params, seed=i) for i, p in enumerate(prompts)]
    outputs: dict[int, list[int]] = {}
    for group in [[r] for r in requests] if alone else [requests]:
        engine.add(group)
        for step in itertools.count(1):
            if not engine.has_work():
                break
            for completion in engine.step():
                assert completion.error_code is None, completion.error_message
                assert completion.request_id not in outputs
                outputs[completion.request_id] = list(completion.token_ids)
            if preempt and step in PREEMPT_AT and engine.scheduler.slots.num_running:
                engine.scheduler._preempt(engine.scheduler._youngest())
            engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_used == 0
    return [outputs[i] for i in range(len(prompts))]


class Oracle:
    """transformers' float32 logits on our own history, one forward pass per distinct (prompt, output)."""

    def __init__(self, model) -> None:
        self.model = model.eval()
        self._seen: dict[tuple, tuple[list[int], list[float]]] = {}

    def judge(self, prompt, output) -> tuple[list[int], list[float]]:
        """(positions where our token is not the argmax, how far below the largest logit each of those is)."""
        key = (tuple(prompt), tuple(output))
        if key not in self._seen:
            ids = torch.tensor([[*prompt, *output]])
            with torch.inference_mode():
                logits = self.model(ids).logits[0, len(prompt) - 1 : -1]
            ours = torch.tensor(output)
            gaps = logits.max(-1).values - logits.gather(1, ours[:, None])[:, 0]
            wrong = (logits.argmax(-1) != ours).nonzero().flatten().tolist()
            self._seen[key] = (wrong, gaps[wrong].tolist())
        return self._seen[key]

    def check_equal(self, prompts, outputs) -> None:
        """Every token is the argmax; a tie may fall either way, in at most one row of 64, and is printed."""
        ties = 0
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            wrong, gaps = self.judge(prompt, output)
            for position, gap in zip(wrong, gaps, strict=True):
                print(f"row {index}, output token {position}: the two top logits differ by {gap:.2e}")
                assert gap < TIE_GAP, f"row {index} leaves float32's argmax at token {position} by {gap}"
            ties += bool(wrong)
        assert ties <= max(1, len(prompts) // 64), f"{ties} rows of {len(prompts)} met a tie"

    def agreement(self, prompts, outputs) -> tuple[float, float]:
        """(share of tokens that are float32's argmax on our history, worst logit gap elsewhere)."""
        judged = [self.judge(p, o) for p, o in zip(prompts, outputs, strict=True)]
        total = sum(map(len, outputs))
        wrong = sum(len(w) for w, _ in judged)
        return 1 - wrong / total, max((g for _, gaps in judged for g in gaps), default=0.0)
