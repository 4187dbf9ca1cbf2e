"""The order of waiting rows: sharers follow one another, decode-heavy branches first, newcomers find their place."""

from __future__ import annotations

import random

from gristmill.engine.batch.block_pool import BlockPool
from gristmill.engine.batch.prefix import PrefixTree
from gristmill.engine.batch.waiting import WaitingRows, plan_order
from tests.engine.simulation import build_sequence


def expected(sequence):
    return sequence.request.sampling.max_tokens


def planned(tree, *rows):
    """The rows' ids in the order planned. rows: (prompt, max_tokens)"""
    sequences = [build_sequence(prompt, max_tokens, i) for i, (prompt, max_tokens) in enumerate(rows)]
    for sequence in sequences:
        tree.add(sequence)
    return [s.request.request_id for s in plan_order(sequences, expected)]


def make_tree(enabled=True):
    return PrefixTree(BlockPool(8), enabled)


def test_sharers_of_a_prefix_follow_one_another():
    rows = [([family] * 40 + [i], 4) for i in range(6) for family in (1, 2, 3)]
    order = planned(make_tree(), *rows)
    families = [rows[i][0][0] for i in order]
    assert sorted(order) == list(range(18))
    assert families == [f for f in dict.fromkeys(families) for _ in range(6)]


def test_each_level_of_a_tree_is_kept_together():
    rng = random.Random(3)
    rows = [([1] * 9 + [d] * 9 + [c] * 9 + [i], 4) for d in (2, 3) for c in (4, 5) for i in range(3)]
    rng.shuffle(rows)
    chapters = [tuple(rows[i][0][9:27]) for i in planned(make_tree(), *rows)]
    documents = [c[0] for c in chapters]
    assert documents == sorted(documents) or documents == sorted(documents, reverse=True)
    assert len(set(chapters)) == sum(a != b for a, b in zip([None, *chapters], chapters, strict=False))


def test_branches_with_more_output_for_their_prompt_come_first():
    light, heavy = ([1] * 100, 4), ([2] * 10, 50)
    assert planned(make_tree(), light, heavy) == [1, 0]
    shared = [9] * 30
    assert planned(make_tree(), (shared + [1] * 60, 8), (shared + [2] * 60, 9), (shared + [3] * 4, 8)) == [
        2,
        1,
        0,
    ]


def test_what_is_computed_already_does_not_count_as_prompt():
    tree = make_tree()
    rows = [build_sequence([1] * 100 + [i], 10, i) for i in range(2)] + [build_sequence([2] * 40, 10, 2)]
    for row in rows:
        tree.add(row)
    node = tree.root.children[rows[0].prompt[:4]]
    assert [s.request.request_id for s in plan_order(rows, expected)][0] == 2
    node.num_filled = 100
    assert [s.request.request_id for s in plan_order(rows, expected)][2] == 2


def test_without_sharing_rows_are_ordered_by_density_alone():
    assert planned(make_tree(enabled=False), ([1] * 20, 1), ([1] * 20, 9), ([1] * 5, 9)) == [2, 1, 0]


def test_in_arrival_order_nothing_is_reordered():
    waiting = WaitingRows(expected, in_arrival_order=True)
    rows = [build_sequence([9 - i] * 5, i + 1, i) for i in range(5)]
    waiting.add(rows[:3])
    waiting.add(rows[3:])
    assert [waiting.pop().request.request_id for _ in range(len(waiting))] == [0, 1, 2, 3, 4]


def test_rows_put_back_come_first_and_removed_ones_never():
    waiting = WaitingRows(expected)
    rows = [build_sequence([i] * 5, 4, i) for i in range(8)]
    waiting.add(rows[:6])
    first, second = waiting.pop(), waiting.pop()
    waiting.put_back([first, second])
    waiting.add(rows[6:])
    waiting.remove(rows[7])
    left = [waiting.pop() for _ in range(len(waiting))]
    assert left[:2] == [first, second]
    assert {r.request.request_id for r in left} == set(range(7))
