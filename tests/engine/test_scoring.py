"""Log-probabilities of given answers: against transformers, in any batch, and between two models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from gristmill.engine.measure.scoring import Forced, Scorer, contrast, plan_batches, score
from tests.engine.parity import generate, load_engine
from tests.engine.tiny_models import build_tiny_model

ROWS = [
    Forced([5, 6, 7], [8, 9]),
    Forced(list(range(10, 60)), list(range(100, 140))),
    Forced([1], [2]),
    Forced(list(range(3, 20)), list(range(30, 45))),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "qwen3", sliding_window=None)


@pytest.fixture(scope="module")
def engine(folder):
    return load_engine(str(folder))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The same vocabulary, other weights, and as many tokens in a step as fewer than a row has."""
    path = build_tiny_model(tmp_path_factory.mktemp("other") / "model", "llama", hidden_size=32, head_dim=16)
    return load_engine(str(path), max_num_batched_tokens=24)


@pytest.fixture(scope="module")
def reference(folder):
    """Log-softmax of transformers at the answer's places."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(row: Forced) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([[*row.prompt_ids, *row.answer_ids]])).logits[0]
        return logits[len(row.prompt_ids) - 1 : -1].log_softmax(-1)

    return run


def picked(logprobs: torch.Tensor, row: Forced) -> np.ndarray:
    return logprobs[torch.arange(len(row.answer_ids)), list(row.answer_ids)].numpy()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{len(row.prompt_ids)}+{len(row.answer_ids)}")
def test_a_score_is_the_log_softmax_of_transformers(engine, reference, row):
    found = score(engine, *row)
    assert found.dtype == np.float32 and found.shape == (len(row.answer_ids),)
    np.testing.assert_allclose(found, picked(reference(row), row), atol=1e-4)


def test_a_row_longer_than_a_step_scores_the_same(folder, reference):
    small = load_engine(str(folder), max_num_batched_tokens=16)
    np.testing.assert_allclose(score(small, *ROWS[1]), picked(reference(ROWS[1]), ROWS[1]), atol=1e-4)


def test_a_contrast_has_both_models_scores_and_the_divergence(engine, other, reference):
    pairs = [(row, row) for row in ROWS]
    found = list(contrast(Scorer(engine, 90), Scorer(other, 90), pairs))
    assert len(found) == len(ROWS)
    scorer = Scorer(other, 90)
    for row, one in zip(ROWS, found, strict=True):
        p, q = reference(row), scorer.log_softmax(scorer.hidden([row]))
        np.testing.assert_allclose(one.first_logprobs, picked(p, row), atol=1e-4)
        np.testing.assert_allclose(one.second_logprobs, score(other, *row), atol=1e-4)
        expected = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        np.testing.assert_allclose(one.kl, expected.numpy(), rtol=1e-3, atol=1e-4)
        assert (one.kl > 0).all()


def test_a_model_does_not_diverge_from_itself(engine):
    (found,) = contrast(Scorer(engine, 64), Scorer(engine, 64), [(ROWS[3], ROWS[3])])
    assert (found.kl == 0).all() and (found.first_logprobs == found.second_logprobs).all()


def test_the_prompts_of_a_pair_may_differ(engine, other):
    pair = (ROWS[0], Forced([50, 51, 52, 53, 54], ROWS[0].answer_ids))
    (found,) = contrast(Scorer(engine, 16), Scorer(other, 16), [pair])
    np.testing.assert_allclose(found.first_logprobs, score(engine, *pair[0]), atol=1e-5)
    np.testing.assert_allclose(found.second_logprobs, score(other, *pair[1]), atol=1e-5)


def test_greedy_tokens_are_the_most_likely_and_scoring_leaves_the_engines_cache_alone(folder):
    engine = load_engine(str(folder))
    prompts = [list(range(20, 60)), list(range(20, 50))]
    before = generate(engine, prompts, 12)
    scorer = Scorer(engine, 64)
    for prompt, output in zip(prompts, before, strict=True):
        logprobs = scorer.log_softmax(scorer.hidden([Forced(prompt, output)]))
        assert logprobs.argmax(-1).tolist() == output
    assert generate(engine, prompts, 12) == before


def test_rows_are_batched_up_to_the_tokens_that_fit_and_in_order():
    assert plan_batches([16, 17, 16, 64, 1], 64) == [slice(0, 3), slice(3, 4), slice(4, 5)]
    assert plan_batches([5], 16) == [slice(0, 1)]
    assert plan_batches([], 16) == []
    with pytest.raises(AssertionError, match="a row of 80 tokens"):
        plan_batches([65], 64)


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"kv_dtype": "fp8"}], ids=str)
def test_what_is_judged_is_what_generates(folder, options):
    """The engine's own greedy tokens are the most likely ones, and not as likely as without the setting."""
    engine, plain = load_engine(str(folder), **options), load_engine(str(folder))
    prompt = list(range(20, 60))
    (output,) = generate(engine, [prompt], 24)
    scorer = Scorer(engine, 80)
    logprobs = scorer.log_softmax(scorer.hidden([Forced(prompt, output)]))
    best = logprobs.max(-1).values.numpy()
    found = score(engine, prompt, output)
    np.testing.assert_allclose(
        found, best, atol=0.02
    )  # codes of a chunk and of a token may round apart at a tie
    assert np.abs(found - score(plain, prompt, output)).max() > 1e-4
