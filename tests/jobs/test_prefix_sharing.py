"""What a sample tells of the sharing in a whole job, against what is so by construction."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from gristmill.jobs.regroup.prefix_sharing import common_prefix_size, estimate_sharing

SYSTEM = b"You are a careful assistant. " * 10
DOCUMENT_BYTES = 1600
QUESTION_BYTES = 100
WINDOW_ROWS = 512


def build_prompt(document: int, row: int) -> bytes:
    text = random.Random(document).randbytes(DOCUMENT_BYTES // 2).hex()
    question = random.Random(-row - 1).randbytes(QUESTION_BYTES // 2).hex()
    return SYSTEM + text.encode() + question.encode()


def sample_windows(rows: list[tuple[int, int]], num_windows: int) -> Iterator[list[bytes]]:
    count = len(rows) // WINDOW_ROWS
    for i in range(num_windows):
        first = (2 * i + 1) * count // (2 * num_windows) * WINDOW_ROWS
        yield [build_prompt(document, row) for document, row in rows[first : first + WINDOW_ROWS]]


@pytest.mark.parametrize(
    ("group_rows", "is_shuffled"), [(1, True), (4, True), (100, True), (4, False), (100, False)]
)
def test_the_sharing_of_many_rows_is_known_from_a_few(group_rows: int, is_shuffled: bool) -> None:
    num_rows, num_windows = 1 << 18, 16
    rows = [(row // group_rows, row) for row in range(num_rows)]
    if is_shuffled:
        random.Random(group_rows).shuffle(rows)
    windows = list(sample_windows(rows, num_windows))
    sharing = estimate_sharing(windows, num_windows * WINDOW_ROWS / num_rows)
    prompt_bytes = len(SYSTEM) + DOCUMENT_BYTES + QUESTION_BYTES
    num_documents = len({document for document, _ in rows})
    truth = 1 - (num_documents * DOCUMENT_BYTES / num_rows + QUESTION_BYTES) / prompt_bytes
    assert sharing.prompt_bytes == prompt_bytes
    assert sharing.sorted == pytest.approx(truth, abs=0.06)
    assert (sharing.gain > 0.1) == (is_shuffled and group_rows > 1)


def test_a_sample_of_everything_is_exact() -> None:
    prompts = [b"aab", b"aac", b"b", b"aab"]
    sharing = estimate_sharing([prompts[:2], prompts[2:]], 1.0)
    assert sharing.in_order == pytest.approx(2 / 10)  # aa of aac
    assert sharing.sorted == pytest.approx(5 / 10)  # aa of aac, aab
    assert sharing.prompt_bytes == 2.5


def test_rows_of_which_few_share_are_not_taken_for_many() -> None:
    chance = random.Random(5)
    rows = [(chance.randrange(200) if chance.random() < 0.05 else 1000 + i, i) for i in range(200_000)]
    sharing = estimate_sharing(list(sample_windows(rows, 16)), 16 * WINDOW_ROWS / len(rows))
    assert sharing.gain < 0.1


def test_prompts_without_a_common_prefix_share_nothing() -> None:
    prompts = [random.Random(i).randbytes(100) for i in range(4000)]
    windows = [prompts[i : i + 500] for i in range(0, 4000, 500)]
    sharing = estimate_sharing(windows, 0.1)
    assert sharing.gain < 0.05
    assert estimate_sharing([], 1.0).gain == 0.0


def test_the_common_prefix_is_found_to_the_byte() -> None:
    chance = random.Random(7)
    for _ in range(3000):
        left = bytes(chance.choices(b"ab", k=chance.randint(0, 400)))
        right = left[: chance.randint(0, len(left))] + bytes(chance.choices(b"ab", k=chance.randint(0, 30)))
        expected = next(
            (i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y),
            min(len(left), len(right)),
        )
        assert common_prefix_size(left, right) == expected
