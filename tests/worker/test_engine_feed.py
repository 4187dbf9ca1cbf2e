"""The feed keeps a bounded window of rows in the engine; after a death the suspects go first and alone."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.config import EngineOptions
from engine.errors import EngineDied
from engine.request import Request, SamplingParams
from worker import engine_feed
from worker.engine_client import EngineClient
from worker.engine_feed import MAX_DEATHS, EngineFeed

LIMIT_S = 20.0


@contextmanager
def _feed(model: str = "null:", window: int = 8) -> Iterator[tuple[EngineClient, EngineFeed]]:
    client = EngineClient(model, EngineOptions())
    client.start()
    try:
        client.wait_loaded(LIMIT_S, lambda: False)
        yield client, EngineFeed(client, window)
    finally:
        client.close()


def _requests(first: int, num_rows: int, text: str = "hi") -> list[Request]:
    return [
        Request(i, array("I", list(text.encode())), SamplingParams()) for i in range(first, first + num_rows)
    ]


def _poll_until_dead(feed: EngineFeed) -> None:
    deadline = time.monotonic() + LIMIT_S
    with pytest.raises(EngineDied):
        while time.monotonic() < deadline:
            feed.poll(0.1)


def test_no_more_rows_than_the_window_are_in_the_engine() -> None:
    with _feed("null:?delay_ms=1000", window=8) as (_, feed):
        feed.push(_requests(0, 20))
        feed.top_up()
        assert feed.num_in_flight == 8
        assert not feed.wants_rows


def test_finished_rows_make_room_for_others() -> None:
    with _feed(window=8) as (_, feed):
        feed.push(_requests(0, 20))
        done: list[int] = []
        while len(done) < 20:
            feed.top_up()
            done += [completion.request_id for completion in feed.poll(LIMIT_S)]
        assert sorted(done) == list(range(20))
        assert feed.wants_rows


def test_long_prompts_fill_the_window_before_its_rows_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_feed, "MAX_TOKENS_IN_FLIGHT", 100)
    with _feed(window=8) as (_, feed):
        feed.push(_requests(0, 2, "x" * 60))
        assert not feed.wants_rows
        feed.top_up()
        assert len(feed.poll(LIMIT_S)) > 0
        assert feed.wants_rows


def test_after_a_death_the_rows_in_flight_go_first_and_alone() -> None:
    with _feed("null:?delay_ms=50", window=4) as (client, feed):
        feed.push(_requests(0, 6))
        feed.top_up()
        feed.kill()
        _poll_until_dead(feed)
        assert feed.restart()
        assert sorted(client.in_flight) == [0, 1, 2, 3]
        while client.in_flight:
            feed.top_up()
            assert set(client.in_flight) <= {0, 1, 2, 3}
            feed.poll(LIMIT_S)
        feed.top_up()
        assert sorted(client.in_flight) == [4, 5]


def test_an_engine_that_finishes_nothing_is_not_started_for_ever() -> None:
    with _feed("null:?crash_on=hi") as (_, feed):
        feed.push(_requests(0, 1))
        feed.top_up()
        for _ in range(MAX_DEATHS - 1):
            _poll_until_dead(feed)
            assert feed.restart()
        _poll_until_dead(feed)
        assert not feed.restart()


def test_a_silent_engine_is_killed_at_the_second_look() -> None:
    with _feed() as (client, feed):
        late = time.monotonic() + engine_feed.ENGINE_TIMEOUT_S + 60
        assert not feed.kill_if_hung(late)
        assert feed.kill_if_hung(late)
        assert client.pid is None
