"""Finding the row that kills the engine: as few deaths as halving allows, and nobody accused by chance."""

from __future__ import annotations

from array import array

import pytest

from gristmill.engine.request import Request, SamplingParams
from gristmill.worker.engine.crash_search import MICRO_BATCH_ROWS, CrashSearch


def _requests(num_rows: int) -> list[Request]:
    return [Request(i, array("I", [65]), SamplingParams()) for i in range(1, num_rows + 1)]


def _find(num_rows: int, culprit: int) -> tuple[int, int]:
    """Plays an engine that dies of `culprit`: its id as found, and the number of deaths until then."""
    suspects, in_engine = CrashSearch(), _requests(num_rows)
    num_deaths = 0
    while True:
        num_deaths += 1
        found = suspects.blame(in_engine)
        if found is not None:
            return found.request_id, num_deaths
        while all(request.request_id != culprit for request in suspects.present):
            assert suspects.discard([request.request_id for request in suspects.present])
        in_engine = suspects.present


@pytest.mark.parametrize(("num_rows", "culprit"), [(1, 1), (2, 2), (16, 7), (17, 17), (256, 1), (4096, 3000)])
def test_the_culprit_is_found_and_the_others_are_not_blamed(num_rows: int, culprit: int) -> None:
    found, num_deaths = _find(num_rows, culprit)
    assert found == culprit
    assert num_deaths <= 9


def test_after_the_first_death_all_rows_go_in_again_together() -> None:
    suspects, rows = CrashSearch(), _requests(40)
    assert suspects.blame(rows) is None
    assert suspects.present == rows


def test_after_the_second_death_they_go_in_by_micro_batches_in_order() -> None:
    suspects, rows = CrashSearch(), _requests(40)
    suspects.blame(rows)
    suspects.blame(rows)
    seen = []
    while suspects:
        present = suspects.present
        assert len(present) <= MICRO_BATCH_ROWS
        seen += present
        suspects.discard([request.request_id for request in present])
    assert seen == rows


def test_rows_that_finished_before_the_death_are_out_of_suspicion() -> None:
    suspects, rows = CrashSearch(), _requests(4)
    suspects.blame(rows)
    assert not suspects.discard([1, 2])
    suspects.blame(rows[2:])
    assert suspects.present == rows[2:]


def test_a_row_that_dies_once_alone_is_not_blamed_yet() -> None:
    suspects, rows = CrashSearch(), _requests(1)
    assert suspects.blame(rows) is None
    assert suspects.discard([1])
    assert suspects.blame(rows) is None


def test_cancelled_rows_are_forgotten_wherever_they_wait() -> None:
    suspects, rows = CrashSearch(), _requests(40)
    suspects.blame(rows)
    suspects.blame(rows)
    assert suspects.discard(range(1, 41))
    assert not suspects
    assert suspects.present == []
