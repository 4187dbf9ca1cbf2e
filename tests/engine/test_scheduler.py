"""The batcher's rule: budget, chunks, seats, preemption, shared prefixes; then anything hypothesis can think of."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gristmill.engine.batch.scheduler import Scheduler
from tests.engine.simulation import build_sequence, run_step, run_to_end


def expect_short_outputs(scheduler):
    """Lets the scheduler believe that rows end after one token, so that it admits more than memory lasts for."""
    for _ in range(8):
        scheduler.expectations.lengths_of(0).note_end(1)


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    scheduler = Scheduler(num_blocks=32, max_num_seqs=4, max_num_batched_tokens=64)
    scheduler.add([build_sequence(range(200), max_tokens=1)])
    steps = run_to_end(scheduler)
    assert [n for step in steps for _, n in step] == [64, 64, 64, 8]


def test_decodes_are_not_starved_by_a_long_prompt():
    scheduler = Scheduler(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=32)
    short = build_sequence([1, 2, 3], max_tokens=20)
    scheduler.add([short])
    run_step(scheduler)
    scheduler.add([build_sequence(range(300), max_tokens=1)])
    for _ in range(5):
        step = run_step(scheduler)
        assert dict(step)[short] == 1
        assert sum(n for _, n in step) == 32


def test_a_waiting_row_takes_a_finished_rows_place_in_the_next_step():
    scheduler = Scheduler(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=64)
    scheduler.add([build_sequence([i] * 5, max_tokens=2) for i in range(3)])
    first, second, third = (run_step(scheduler) for _ in range(3))
    assert [len(s) for s in (first, second, third)] == [2, 2, 1]
    assert not scheduler.waiting


def test_rows_that_share_a_prefix_wait_for_the_one_that_computes_it():
    scheduler = Scheduler(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=256)
    shared = list(range(100, 164))
    rows = [build_sequence([*shared, i, i, i], max_tokens=1) for i in range(5)]
    scheduler.add(rows)
    steps = run_to_end(scheduler)
    assert [[n for _, n in step] for step in steps] == [[67], [3, 3, 3, 3]]
    assert sorted(r.num_cached_tokens for r in rows) == [0, 64, 64, 64, 64]
    assert scheduler.counters().num_cached_tokens == 256


def test_without_the_prefix_cache_every_prompt_is_computed():
    scheduler = Scheduler(
        num_blocks=64, max_num_seqs=8, max_num_batched_tokens=256, enable_prefix_cache=False
    )
    scheduler.add([build_sequence([*range(64), i], max_tokens=1) for i in range(3)])
    steps = run_to_end(scheduler)
    assert [n for _, n in steps[0]] == [65, 65, 65]


def test_out_of_blocks_the_youngest_is_preempted_and_still_finishes():
    scheduler = Scheduler(num_blocks=6, max_num_seqs=4, max_num_batched_tokens=64)
    expect_short_outputs(scheduler)
    rows = [build_sequence([i + 1] * 30, max_tokens=40, request_id=i) for i in range(3)]
    scheduler.add(rows)
    run_to_end(scheduler)
    assert scheduler.counters().num_preemptions > 0
    assert all(r.num_output_tokens == 40 for r in rows)


def test_cancelling_frees_blocks_in_every_state():
    scheduler = Scheduler(num_blocks=16, max_num_seqs=1, max_num_batched_tokens=64)
    rows = [build_sequence(range(40), max_tokens=9) for _ in range(2)]
    scheduler.add(rows)
    run_step(scheduler)
    for row in rows:
        scheduler.cancel(row)
    scheduler.check_integrity()
    assert scheduler.pool.num_used == 0


def test_admission_keeps_room_for_the_expected_output():
    scheduler = Scheduler(num_blocks=8, max_num_seqs=8, max_num_batched_tokens=256)
    scheduler.add([build_sequence([i + 1] * 16, max_tokens=48) for i in range(4)])
    assert len(run_step(scheduler)) == 2
    run_to_end(scheduler)
    assert scheduler.counters().num_preemptions == 0


prompts = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 70), st.integers(1, 30)),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@example(
    [(0, 0, 18, 1), (0, 1, 1, 1), (0, 4, 22, 30), (0, 5, 12, 30)], 7, 1, 8, True, 0
)  # preempts its only row
@given(prompts, st.integers(7, 24), st.integers(1, 8), st.integers(8, 64), st.booleans(), st.integers(0, 24))
def test_every_row_finishes_and_no_block_leaks(rows, num_blocks, max_num_seqs, budget, cache, late):
    """Rows share three levels, parting within blocks too; some arrive while others run; lengths are misjudged."""
    scheduler = Scheduler(num_blocks, max_num_seqs, max(budget, max_num_seqs), cache)
    expect_short_outputs(scheduler)
    sequences = []
    for i, (family, blocks, tail, output) in enumerate(rows):
        prompt = ([family] * 13 * min(blocks, 2) + [family + 9, *range(blocks)] * blocks + [i] * tail)[
            : 16 * 6
        ]
        sequences.append(build_sequence(prompt, output, i, max_total=num_blocks * 16))
    scheduler.add(sequences[late:])
    for _ in range(3):
        if scheduler.waiting or scheduler.slots.num_running:
            run_step(scheduler)
    scheduler.add(sequences[:late])
    run_to_end(scheduler)
    assert all(s.num_tokens == s.max_total_tokens for s in sequences)
