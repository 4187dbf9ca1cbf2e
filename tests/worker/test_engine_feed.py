"""The feed keeps a bounded window of rows in the engine; after a death the suspects go in first and alone."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from gristmill.engine.config import EngineOptions
from gristmill.engine.errors import EngineDied
from gristmill.engine.request import Completion, Request, SamplingParams
from gristmill.worker.engine import supervisor as engine_feed
from gristmill.worker.engine.client import EngineClient
from gristmill.worker.engine.supervisor import ENGINE_TIMEOUT_S, EngineSupervisor

LIMIT_S = 20.0


@contextmanager
def _feed(
    model: str = "null:", window: int = 8, engine_timeout_s: float = ENGINE_TIMEOUT_S
) -> Iterator[tuple[EngineClient, EngineSupervisor]]:
    client = EngineClient(model, EngineOptions())
    client.start()
    try:
        client.wait_loaded(LIMIT_S, lambda: False)
        yield client, EngineSupervisor(client, window, engine_timeout_s)
    finally:
        client.close()


def _requests(first: int, num_rows: int, text: str = "hi") -> list[Request]:
    return [
        Request(i, array("I", list(text.encode())), SamplingParams()) for i in range(first, first + num_rows)
    ]


def _poll_until_dead(feed: EngineSupervisor) -> None:
    deadline = time.monotonic() + LIMIT_S
    with pytest.raises(EngineDied):
        while time.monotonic() < deadline:
            feed.poll(0.1)


def test_no_more_rows_than_the_window_are_in_the_engine() -> None:
    with _feed("null:?delay_ms=1000", window=8) as (_, feed):
        feed.push(_requests(1, 20))
        feed.top_up()
        assert feed.num_in_flight == 8
        assert not feed.wants_rows


def test_finished_rows_make_room_for_others() -> None:
    with _feed(window=8) as (_, feed):
        feed.push(_requests(1, 20))
        done: list[int] = []
        while len(done) < 20:
            feed.top_up()
            done += [completion.request_id for completion in feed.poll(LIMIT_S)]
        assert sorted(done) == list(range(1, 21))
        assert feed.wants_rows


def test_long_prompts_fill_the_window_before_its_rows_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_feed, "MAX_TOKENS_IN_FLIGHT", 100)
    with _feed(window=8) as (_, feed):
        feed.push(_requests(1, 2, "x" * 60))
        assert not feed.wants_rows
        feed.top_up()
        assert len(feed.poll(LIMIT_S)) > 0
        assert feed.wants_rows


def test_after_a_death_the_rows_in_flight_go_first_and_alone() -> None:
    with _feed("null:?delay_ms=50", window=4) as (client, feed):
        feed.push(_requests(1, 6))
        feed.top_up()
        feed.kill()
        _poll_until_dead(feed)
        assert feed.restart()
        assert sorted(client.in_flight) == [1, 2, 3, 4]
        while client.in_flight:
            feed.top_up()
            assert set(client.in_flight) <= {1, 2, 3, 4}
            feed.poll(LIMIT_S)
        feed.top_up()
        assert sorted(client.in_flight) == [5, 6]


def _finish(feed: EngineSupervisor) -> dict[int, Completion]:
    """Feeds until nothing is left, over every death; completions by request id."""
    done: dict[int, Completion] = {}
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        feed.top_up()
        try:
            done.update((completion.request_id, completion) for completion in feed.poll(0.05))
        except EngineDied:
            assert feed.restart()
        if not feed.num_in_flight and not feed.has_rows:
            return done
    pytest.fail(f"only {sorted(done)} finished")


def test_a_row_that_kills_the_engine_is_poisoned_and_the_others_finish() -> None:
    with _feed("null:?crash_on=poison", window=32) as (_, feed):
        feed.push([*_requests(1, 20), *_requests(21, 1, "poison"), *_requests(22, 20)])
        done = _finish(feed)
    assert sorted(done) == list(range(1, 42))
    assert [i for i, completion in done.items() if completion.error_code] == [21]
    assert done[21].error_code == "poisoned"
    assert "3 times" in (done[21].error_message or "")


def test_a_poisoned_row_that_is_alone_is_found_too() -> None:
    with _feed("null:?crash_on=poison") as (_, feed):
        feed.push(_requests(1, 1, "poison"))
        assert _finish(feed)[1].error_code == "poisoned"


def test_a_row_that_hangs_the_engine_is_poisoned_too() -> None:
    with _feed("null:?hang_on=poison", engine_timeout_s=1.0) as (_, feed):
        feed.push([*_requests(1, 3), *_requests(4, 1, "poison")])
        done: dict[int, Completion] = {}
        deadline = time.monotonic() + LIMIT_S
        while len(done) < 4 and time.monotonic() < deadline:
            feed.top_up()
            try:
                done.update((completion.request_id, completion) for completion in feed.poll(0.2))
            except EngineDied:
                assert feed.restart()
            feed.kill_if_hung(time.monotonic())
    assert done[4].error_code == "poisoned"
    assert {done[i].error_code for i in (1, 2, 3)} == {None}


def test_no_row_is_blamed_when_the_canary_dies_too() -> None:
    with _feed("null:?crash_on=hi") as (client, feed):
        feed.push(_requests(1, 1))
        feed.top_up()
        completions: list[Completion] = []
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            try:
                completions += feed.poll(0.05)
            except EngineDied:
                # An ill host: what ran before kills the engine as well.
                feed._canary = replace(feed._canary, prompt_token_ids=array("I", list(b"hi")))
                if not feed.restart():
                    break
        assert completions == []
        assert time.monotonic() < deadline


def test_a_silent_engine_is_killed_at_the_second_look() -> None:
    with _feed() as (client, feed):
        late = time.monotonic() + ENGINE_TIMEOUT_S + 60
        assert not feed.kill_if_hung(late)
        assert feed.kill_if_hung(late)
        assert client.pid is None
