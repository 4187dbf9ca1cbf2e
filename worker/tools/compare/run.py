"""Runs rows through two engines in this process, greedily, and scores each side's answers under both.

Imported by the command only when it runs: the engines bring torch. What the figures are is in figures.py.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from gristmill.engine.build import build_engine
from gristmill.engine.engine import Engine
from gristmill.engine.measure.scoring import Forced, Scorer, contrast
from gristmill.engine.request import Completion, Request
from gristmill.engine.text.tokenizer import Tokenizer
from gristmill.worker.run.prepare import Preparer
from gristmill.worker.show.progress import Display, Progress
from gristmill.worker.tools.compare.answers import count_common, find_choice, is_json
from gristmill.worker.tools.compare.pairs import Answer, Comparison, Pair, Scores
from gristmill.worker.tools.compare.rows import CompareRow, CompareRows
from gristmill.worker.tools.compare.sides import Side, build_options

SHOW_INTERVAL_S = 0.5
MAX_PROBES = 64  # rows whose prompts both tokenizers must cut alike
SCORED_TOGETHER = 32  # rows between two looks of the display


def run_compare(
    sides: tuple[Side, Side], rows: CompareRows, choices: tuple[str, ...], display: Display
) -> Comparison:
    """Both models are loaded, then all rows run through A, then B, then the answers are scored. Raises ModelRefused."""
    first, second = (build_engine(side.path, build_options(side)) for side in sides)
    unscored = find_vocabulary_fault(first, second, [row.prompt for row in rows.rows])
    of_a, of_b = (
        generate(engine, side, rows, choices, display)
        for engine, side in zip((first, second), sides, strict=True)
    )
    pairs = [
        pair_answers(row, a, b, first.tokenizer) for row, a, b in zip(rows.rows, of_a, of_b, strict=True)
    ]
    if unscored is None:
        pairs = score_pairs(first, second, pairs, display)
    return Comparison(
        sides=sides,
        infos=(first.info, second.info),
        pairs=pairs,
        choices=choices,
        max_tokens=rows.spec.max_tokens,
        unscored=unscored,
        num_unlike_prompts=sum(p.a.prompt_ids != p.b.prompt_ids for p in pairs if p.a and p.b),
    )


def generate(
    engine: Engine, side: Side, rows: CompareRows, choices: Sequence[str], display: Display
) -> list[Answer | str]:
    """An answer a row, in order; for a row that can't run, why."""
    preparer = Preparer(rows.spec, rows.sources, engine.tokenizer, rows.prompt_source, engine.info, keep=())
    batch = preparer.prepare_rows([row.row for row in rows.rows])
    places = {(row.row.source_index, row.row.row_index): index for index, row in enumerate(rows.rows)}
    found: dict[int, Answer | str] = {
        places[result.source_index, result.row_index]: result.error_message or "a null, skipped"
        for result in batch.results
    }
    prompts = {request.request_id: request.prompt_token_ids for request in batch.requests}
    display.start(len(rows.rows), len(found), f"{side.label}: answers")
    try:
        for completion in run_requests(engine, batch.requests, len(rows.rows), len(found), display):
            pending = batch.pending[completion.request_id]
            answer = to_answer(completion, prompts[completion.request_id], choices)
            found[places[pending.source_index, pending.row_index]] = answer
    finally:
        display.stop()
    return [found[index] for index in range(len(rows.rows))]


def run_requests(
    engine: Engine, requests: list[Request], num_rows: int, num_failed: int, display: Display
) -> Iterator[Completion]:
    """The completions of all requests, as they end."""
    engine.add(requests)
    before, num_done, shown_s = engine.counters(), num_failed, time.monotonic()
    while engine.has_work():
        completions = engine.step()
        yield from completions
        num_done += len(completions)
        now = time.monotonic()
        if now - shown_s < SHOW_INTERVAL_S and engine.has_work():
            continue
        shown_s, counters = now, engine.counters().minus(before)
        tokens = (counters.num_prompt_tokens, counters.num_output_tokens, counters.num_cached_tokens)
        display.update(Progress(num_done, num_rows, num_failed, *tokens))


def to_answer(completion: Completion, prompt_ids: array[int], choices: Sequence[str]) -> Answer | str:
    """The completion with what can be said of it alone; the message of one that failed."""
    if completion.error_code is not None:
        return completion.error_message or completion.error_code
    return Answer(
        text=completion.text,
        prompt_ids=prompt_ids,
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        choice=find_choice(completion.text, choices),
        is_json=is_json(completion.text),
    )


def pair_answers(row: CompareRow, a: Answer | str, b: Answer | str, tokenizer: Tokenizer) -> Pair:
    """The pair of a row. Where the answers part is counted in A's tokens; the tokenizer is A's."""
    if isinstance(a, str) or isinstance(b, str):
        return Pair(row, error=a if isinstance(a, str) else f"under B: {b}" if isinstance(b, str) else None)
    if a.text == b.text:
        return Pair(row, a, b)
    parted = count_common(a.token_ids, b.token_ids)
    if tokenizer.decode(a.token_ids) != a.text or tokenizer.decode(b.token_ids) != b.text:
        parted = count_common(*encode_plain(tokenizer, [a.text, b.text]))  # B's ids are of another vocabulary
    return Pair(row, a, b, first_divergence=parted)


def find_vocabulary_fault(first: Engine, second: Engine, prompts: Sequence[str]) -> str | None:
    """Why probabilities of the two can't be compared: their tokens are not the same; None where they are."""
    a, b = (engine.runner.model.config.vocab_size for engine in (first, second))
    if a != b:
        return f"the vocabularies differ: A has {a:,} tokens, B has {b:,}"
    probes = [prompt for prompt in prompts if prompt][:MAX_PROBES]
    if encode_plain(first.tokenizer, probes) != encode_plain(second.tokenizer, probes):
        return "the vocabularies differ: A and B cut the same text into other tokens"
    for token_id in range(a):
        texts = [each.tokenizer.decode([token_id]) for each in (first, second)]
        if texts[0] != texts[1]:
            return f"the vocabularies differ: token {token_id} is {texts[0]!r} of A and {texts[1]!r} of B"
    return None


def encode_plain(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The texts' own tokens, without one that begins every text."""
    encoded = tokenizer.encode_batch([tokenizer.render_text(text) for text in texts])
    bos = tokenizer.bos_token_id
    return [list(ids[1:] if bos is not None and ids[:1] == array("I", [bos]) else ids) for ids in encoded]


def score_pairs(first: Engine, second: Engine, pairs: Sequence[Pair], display: Display) -> list[Pair]:
    """The pairs with their scores; one stays without where an answer is too long behind the other's prompt."""
    places = [index for index, pair in enumerate(pairs) if fits(first, second, pair)]
    scored = list(pairs)
    if not places:
        return scored
    longest = max(forced.num_tokens for i in places for forced in to_forced(pairs[i]))
    scorers = (Scorer(first, longest), Scorer(second, longest))
    display.start(len(places), 0, "A and B: scores")
    num_tokens = 0
    try:
        for start in range(0, len(places), SCORED_TOGETHER):
            some = places[start : start + SCORED_TOGETHER]
            for index, scores in zip(some, score_some(*scorers, [pairs[i] for i in some]), strict=True):
                pair = pairs[index]
                scored[index] = Pair(pair.row, pair.a, pair.b, None, pair.first_divergence, scores)
                num_tokens += sum(len(forced.answer_ids) for forced in to_forced(pair)[::2])
            display.update(Progress(start + len(some), len(places), completion_tokens=num_tokens))
    finally:
        display.stop()
    return scored


def score_some(first: Scorer, second: Scorer, pairs: Sequence[Pair]) -> Iterator[Scores]:
    """The scores of pairs that have answers and fit; sums in float64."""
    forced = [to_forced(pair) for pair in pairs]
    of_a = contrast(first, second, [(a, under_b) for a, under_b, _, _ in forced])
    of_b = contrast(second, first, [(b, under_a) for _, _, b, under_a in forced])
    for a, b in zip(of_a, of_b, strict=True):
        logprobs = (a.first_logprobs, a.second_logprobs, b.second_logprobs, b.first_logprobs)
        a_under_a, a_under_b, b_under_a, b_under_b = (float(each.sum(dtype=np.float64)) for each in logprobs)
        yield Scores(a_under_a, a_under_b, b_under_a, b_under_b, a.kl)


def to_forced(pair: Pair) -> tuple[Forced, Forced, Forced, Forced]:
    """A's answer after A's prompt and after B's, B's answer after B's prompt and after A's."""
    assert pair.a is not None and pair.b is not None
    of_a, of_b = pair.a.token_ids, pair.b.token_ids
    behind_a, behind_b = pair.a.prompt_ids, pair.b.prompt_ids
    return Forced(behind_a, of_a), Forced(behind_b, of_a), Forced(behind_b, of_b), Forced(behind_a, of_b)


def fits(first: Engine, second: Engine, pair: Pair) -> bool:
    """Whether the pair has answers, and each of them is within both models' reach."""
    if pair.a is None or pair.b is None:
        return False
    room = min(first.info.max_request_tokens, second.info.max_request_tokens)
    return all(forced.num_tokens <= room for forced in to_forced(pair))
