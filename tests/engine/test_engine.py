"""The engine as a whole on a tiny random model: every end a row can have, and what rows can't do to one another."""

from __future__ import annotations

from array import array

import pytest

from gristmill.engine.build import token_budget
from gristmill.engine.request import Request, SamplingParams
from tests.engine.parity import generate, load_engine, rebuild
from tests.engine.tiny_models import build_tiny_model

PROMPTS = [[5 + i, 9, 30 + i, 7, 100 + i] * (1 + i % 4) for i in range(12)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = build_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama")
    return load_engine(str(folder), num_kv_blocks=64)


@pytest.fixture
def engine(loaded):
    return rebuild(loaded, chunk=64, prefix_cache=True, num_blocks=64)


def complete(engine, *requests):
    """Runs the requests to their ends; completions by request id."""
    engine.add(list(requests))
    done = {}
    while engine.has_work():
        for completion in engine.step():
            assert completion.request_id not in done
            done[completion.request_id] = completion
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_used == 0
    return done


def request(prompt, request_id=0, seed=0, **sampling):
    return Request(request_id, array("I", prompt), SamplingParams(**sampling), seed)


def test_max_tokens_ends_a_row_by_length(engine):
    done = complete(engine, request(PROMPTS[0], max_tokens=7, ignore_eos=True))[0]
    assert (done.finish_reason, done.num_output_tokens, len(done.token_ids)) == ("length", 7, 7)
    assert done.text == engine.tokenizer.decode(done.token_ids)
    assert done.queue_wait_s <= done.time_to_first_token_s


def test_without_max_tokens_a_row_runs_to_the_end_of_the_context(engine):
    done = complete(engine, request(PROMPTS[1], ignore_eos=True))[0]
    assert done.finish_reason == "length"
    assert done.num_prompt_tokens + done.num_output_tokens == engine.info.context_size == 256


def test_an_end_of_text_token_stops_the_row_and_is_not_text(engine, monkeypatch):
    tokens = generate(engine, PROMPTS[:1], 10)[0]
    monkeypatch.setattr(engine.tokenizer, "eos_token_ids", (399, tokens[4]))
    done = complete(engine, request(PROMPTS[0], max_tokens=10))[0]
    first = tokens.index(tokens[4])
    assert (done.finish_reason, list(done.token_ids)) == ("stop", tokens[: first + 1])
    assert done.text == engine.tokenizer.decode(tokens[:first])


def test_a_stop_token_stops_the_row_even_when_end_of_text_is_ignored(engine):
    tokens = generate(engine, PROMPTS[:1], 10)[0]
    done = complete(engine, request(PROMPTS[0], max_tokens=10, ignore_eos=True, stop_token_ids=(tokens[3],)))[
        0
    ]
    assert (done.finish_reason, len(done.token_ids)) == ("stop", tokens.index(tokens[3]) + 1)


def test_a_stop_string_across_tokens_cuts_the_text_before_it(engine):
    text = complete(engine, request(PROMPTS[2], max_tokens=20, ignore_eos=True))[0].text
    stop = text[6:11]
    done = complete(engine, request(PROMPTS[2], max_tokens=20, ignore_eos=True, stop=(stop,)))[0]
    assert done.finish_reason == "stop"
    assert done.text == text[: text.index(stop)]
    assert done.num_output_tokens < 20


def test_a_row_that_never_meets_its_stop_string_keeps_all_its_text(engine):
    plain = complete(engine, request(PROMPTS[2], max_tokens=9, ignore_eos=True))[0]
    done = complete(engine, request(PROMPTS[2], max_tokens=9, ignore_eos=True, stop=("never to be seen",)))[0]
    assert (done.finish_reason, done.text) == ("length", plain.text)


def test_a_prompt_beyond_the_context_is_an_error_at_once_and_the_others_finish(engine):
    done = complete(
        engine,
        request(PROMPTS[0], 0, max_tokens=3, ignore_eos=True),
        request([7] * 300, 1, max_tokens=3),
        request(PROMPTS[1], 2, max_tokens=3, ignore_eos=True),
    )
    assert [done[i].error_code for i in range(3)] == [None, "prompt_too_long", None]
    assert "300" in done[1].error_message and "256" in done[1].error_message


def test_a_prompt_that_never_fits_the_cache_is_an_error_at_once(loaded):
    engine = rebuild(loaded, chunk=64, prefix_cache=True, num_blocks=8)
    done = complete(engine, request([7] * 200, 0), request(PROMPTS[0], 1, max_tokens=2, ignore_eos=True))
    assert done[0].error_code == "request_too_large" and "200" in done[0].error_message
    assert done[1].finish_reason == "length"


@pytest.mark.parametrize("prompt, code", [([], "empty_prompt"), ([5, 9_999], "wrong_type")])
def test_a_prompt_that_is_no_prompt_is_an_error(engine, prompt, code):
    assert complete(engine, request(prompt))[0].error_code == code


def test_cancelled_rows_leave_no_trace_and_the_others_are_unchanged(engine):
    expected = generate(engine, PROMPTS, 12)
    engine.add([request(p, i, max_tokens=12, ignore_eos=True) for i, p in enumerate(PROMPTS)])
    engine.step()
    engine.cancel([0, 3, 11, 99])
    done = {}
    while engine.has_work():
        done |= {c.request_id: list(c.token_ids) for c in engine.step()}
    assert done == {i: t for i, t in enumerate(expected) if i not in (0, 3, 11)}
    assert engine.scheduler.pool.num_used == 0


@pytest.mark.parametrize(
    "sampling",
    [dict(), dict(temperature=0.9), dict(temperature=0.7, top_p=0.9), dict(temperature=1.2, top_k=20, min_p=0.02),
     dict(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.2)],
    ids=str,
)  # fmt: skip
def test_a_row_gets_the_same_tokens_alone_and_in_a_batch(engine, sampling):
    together = generate(engine, PROMPTS, 15, **sampling)
    assert generate(engine, PROMPTS, 15, alone=True, **sampling) == together
    assert generate(engine, PROMPTS, 15, preempt=True, **sampling) == together


def test_another_seed_draws_another_text(engine):
    rows = [request(PROMPTS[0], i, seed=i, max_tokens=15, temperature=1.0, ignore_eos=True) for i in range(8)]
    texts = {tuple(c.token_ids) for c in complete(engine, *rows).values()}
    assert len(texts) == 8


def test_the_counters_add_up(engine):
    shared = list(range(3, 67))
    rows = [request([*shared, 90 + i], i, max_tokens=4, ignore_eos=True) for i in range(6)]
    complete(engine, *rows)
    counters = engine.counters()
    assert counters.num_prompt_tokens == 6 * 65
    assert counters.num_cached_tokens == 5 * 64
    assert counters.num_computed_prompt_tokens == 6 * 65 - 5 * 64
    assert counters.num_output_tokens == 24
    assert (counters.num_running, counters.num_waiting, counters.num_kv_blocks_used) == (0, 0, 0)


def test_half_a_thousand_rows_of_mixed_length_all_finish(engine):
    rows = [
        request(
            [3 + i % 350] * (1 + i * 7 % 90),
            i,
            seed=i,
            max_tokens=1 + i % 9,
            temperature=i % 2,
            ignore_eos=True,
        )
        for i in range(500)
    ]
    done = complete(engine, *rows)
    assert [done[i].num_output_tokens for i in range(500)] == [1 + i % 9 for i in range(500)]


@pytest.mark.parametrize("seconds, budget", [(0.1, 1024), (1.0, 512), (4.0, 128), (60.0, 64)])
def test_a_slow_model_takes_smaller_steps(loaded, monkeypatch, seconds, budget):
    model = loaded.runner.model
    monkeypatch.setattr(model, "step_seconds", lambda num_rows: seconds * num_rows / 64)
    assert token_budget(model) == budget
