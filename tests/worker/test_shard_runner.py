"""The runner's loop over a real store, a real engine process and real files: each row once, whatever dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from gristmill.engine.config import EngineOptions
from gristmill.engine.text.tokenizer import NullTokenizer
from gristmill.jobs.errors import OutputError
from gristmill.jobs.owner import current_owner
from gristmill.jobs.plan.cutting import plan_shards
from gristmill.jobs.records import offer_for
from gristmill.jobs.spec import parse_spec
from gristmill.jobs.storage.folder import open_storage
from gristmill.jobs.storage.hashing_file import HashingFile
from gristmill.jobs.storage.local import LocalStorage
from gristmill.jobs.store.database import database_url
from gristmill.jobs.store.store import Store, open_store
from gristmill.worker.engine.client import EngineClient
from gristmill.worker.engine.credit_window import ROWS_PER_SEQ
from gristmill.worker.engine.supervisor import MAX_CULPRITS, EngineSupervisor
from gristmill.worker.local.run import load_order
from gristmill.worker.run.job_context import ContextLoader, Contexts
from gristmill.worker.run.outcome import RunEnd, RunnerOptions, RunOutcome
from gristmill.worker.run.shard_runner import ShardRunner
from gristmill.worker.run.shard_source import ShardSource
from tests.worker.conftest import begin_run

LIMIT_S = 30.0


class Rig:
    """A job with its runner, and the parts of it that tests look at."""

    def __init__(
        self,
        kit: Any,
        store: Store,
        client: EngineClient,
        num_rows: int,
        shard_rows: int,
        window: int,
        options: RunnerOptions,
        storage: LocalStorage | None,
        texts: dict[int, str],
    ) -> None:
        rows = [{"text": texts.get(i, f"row {i}")} for i in range(num_rows)]
        spec = parse_spec(
            {
                "input": [str(kit.write_jsonl(rows))],
                "output": str(kit.output),
                "model": "null:",
                "prompt": "{{ text }}",
                "max_tokens": 8,
            }
        )
        order = load_order(spec)
        plan = plan_shards(order.sources, shard_rows)
        self.kit = kit
        self.store = store
        self.client = client
        self.storage = storage or open_storage(order.spec.output)
        self.job = begin_run(store, order, plan)
        info = client.wait_loaded(LIMIT_S, lambda: False)
        context = ContextLoader(store.jobs, NullTokenizer(), info).load(self.job.job_id)
        self.should_stop = False
        self.display = kit.new_display()
        self.feed = EngineSupervisor(client, window)
        context = replace(context, target=replace(context.target, storage=self.storage))
        self.runner = ShardRunner(
            store,
            ShardSource(store.claims, offer_for(self.job), current_owner()),
            self.feed,
            Contexts(lambda _: context),
            self.display,
            lambda: self.should_stop,
            options,
        )

    def turn_until(self, condition: Any) -> None:
        """Turns the loop by hand until the condition holds."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.runner.run_once(time.monotonic()) is None
            assert time.monotonic() < deadline

    def status(self) -> Any:
        return self.store.jobs.status(self.job.job_id)


@contextmanager
def _rig(
    kit: Any,
    num_rows: int = 300,
    shard_rows: int = 50,
    window: int = 64,
    model: str = "null:",
    options: RunnerOptions | None = None,
    storage: LocalStorage | None = None,
    texts: dict[int, str] | None = None,
) -> Iterator[Rig]:
    client = EngineClient(model, EngineOptions())
    client.start()
    try:
        with open_store(database_url(None)) as store:
            yield Rig(
                kit,
                store,
                client,
                num_rows,
                shard_rows,
                window,
                options or RunnerOptions(display_s=0.0),
                storage,
                texts or {},
            )
    finally:
        client.kill()


def _row_indexes(kit: Any) -> list[int]:
    return [row["row_index"] for row in kit.rows()]


def test_every_row_gets_one_result_in_input_order(kit: Any) -> None:
    with _rig(kit) as rig:
        assert rig.runner.run() == RunOutcome(RunEnd.FINISHED)
        assert _row_indexes(kit) == list(range(300))
        assert rig.status().shards == {"done": 6}


def test_the_engine_never_runs_dry_at_the_border_of_shards(kit: Any) -> None:
    in_flight: list[int] = []
    with _rig(kit, num_rows=400, shard_rows=40, window=64, model="null:?delay_ms=3") as rig:
        rig.turn_until(lambda: rig.feed.num_in_flight > 0)
        while rig.status().rows_done + rig.feed.num_in_flight < 360:
            rig.runner.run_once(time.monotonic())
            in_flight.append(rig.feed.num_in_flight)
        assert rig.runner.run().end is RunEnd.FINISHED
    assert len(in_flight) > 10
    assert min(in_flight) > 0


def test_a_killed_engine_process_costs_no_row(kit: Any) -> None:
    with _rig(kit, model="null:?delay_ms=1") as rig:
        for num_done in (20, 90, 150):
            rig.turn_until(lambda n=num_done: rig.display.rows_done() >= n)
            assert rig.client.pid is not None
            os.kill(rig.client.pid, signal.SIGKILL)
        assert rig.runner.run().end is RunEnd.FINISHED
        assert _row_indexes(kit) == list(range(300))
        assert {row["error_code"] for row in kit.rows()} == {None}
        assert len(rig.display.notes) == 3


def test_a_row_that_kills_the_engine_is_an_error_row_and_all_others_complete(kit: Any) -> None:
    with _rig(kit, model="null:?crash_on=poison", texts={120: "poison"}) as rig:
        assert rig.runner.run().end is RunEnd.FINISHED
        assert rig.status().shards == {"done": 6}
        assert _row_indexes(kit) == list(range(300))
        assert {row["row_index"]: row["error_code"] for row in kit.rows() if row["error_code"]} == {
            120: "poisoned"
        }


def test_rows_that_all_kill_the_engine_end_the_run_before_they_are_all_blamed(kit: Any) -> None:
    with _rig(kit, num_rows=100, model="null:?crash_on=row") as rig:
        outcome = rig.runner.run()
        assert outcome.end is RunEnd.ENGINE_FAILED
        assert "one after the other" in (outcome.message or "")
        assert rig.status().completed == 0
        assert rig.status().failed <= MAX_CULPRITS


def test_the_next_shard_enters_the_engine_before_the_present_one_is_through(kit: Any) -> None:
    """The window holds ROWS_PER_SEQ times what can run at once: half of it full is more than all that can run."""
    in_flight: list[int] = []
    with _rig(kit, num_rows=1200, shard_rows=150, window=64, model="null:?delay_ms=4") as rig:
        rig.turn_until(lambda: rig.feed.num_in_flight >= 60)
        while rig.display.rows_done() < 1100:
            assert rig.runner.run_once(time.monotonic()) is None
            in_flight.append(rig.feed.num_in_flight)
        assert rig.runner.run().end is RunEnd.FINISHED
    assert len(in_flight) > 50
    assert min(in_flight) >= 64 // 2 >= 64 / ROWS_PER_SEQ * 0.9


def test_a_stop_commits_every_finished_row_and_queues_the_rest(kit: Any) -> None:
    with _rig(kit, model="null:?delay_ms=1") as rig:
        rig.turn_until(lambda: rig.display.rows_done() >= 75)
        rig.should_stop = True
        started_s = time.monotonic()
        assert rig.runner.run().end is RunEnd.INTERRUPTED
        assert time.monotonic() - started_s < 2.0
        status = rig.status()
        assert 75 <= status.completed < 300
        assert len(_row_indexes(kit)) == status.completed
        assert set(status.shards) <= {"done", "queued"}


def test_a_checkpoint_makes_the_rows_of_an_unfinished_shard_safe(kit: Any) -> None:
    options = RunnerOptions(display_s=0.0, checkpoint_s=0.0, housekeeping_s=0.0)
    with _rig(kit, num_rows=200, shard_rows=200, model="null:?delay_ms=1", options=options) as rig:
        rig.turn_until(lambda: rig.status().completed >= 20)
        status = rig.status()
        assert status.shards == {"running": 1}
        assert len(_row_indexes(kit)) >= 20
        assert rig.runner.run().end is RunEnd.FINISHED
        assert _row_indexes(kit) == list(range(200))
        assert rig.status().completed == 200


def test_a_shard_with_much_text_is_committed_before_its_time(kit: Any) -> None:
    options = RunnerOptions(checkpoint_chars=100, housekeeping_s=0.0)
    with _rig(kit, num_rows=200, shard_rows=200, model="null:?delay_ms=1", options=options) as rig:
        rig.turn_until(lambda: rig.status().completed > 0)
        assert rig.status().shards == {"running": 1}


def test_an_input_that_changed_while_the_job_ran_fails_its_shards_and_keeps_the_rest(kit: Any) -> None:
    with _rig(kit, num_rows=500, shard_rows=50, model="null:?delay_ms=2", window=16) as rig:
        rig.turn_until(lambda: rig.status().shards.get("done", 0) >= 1)
        kit.write_jsonl([{"text": "other"}])
        assert rig.runner.run().end is RunEnd.FINISHED
        status = rig.status()
        assert set(status.shards) == {"done", "failed"}
        assert status.completed == len(kit.rows()) >= 50


def test_a_shard_that_another_attempt_took_over_is_not_committed_here(kit: Any) -> None:
    options = RunnerOptions(display_s=0.0, heartbeat_s=0.0, housekeeping_s=0.0)
    with _rig(kit, num_rows=60, shard_rows=60, model="null:?delay_ms=2", options=options) as rig:
        rig.turn_until(lambda: rig.display.rows_done() >= 5)
        late_clock = time.time() + 3600
        with open_store(database_url(None), clock=lambda: late_clock) as other:
            taken = other.claims.next(offer_for(rig.job), replace(current_owner(), host="elsewhere"))
        assert taken is not None
        assert rig.runner.run().end is RunEnd.FINISHED
        assert kit.rows() == []
        assert rig.status().completed == 0


class FullDisk(LocalStorage):
    """A storage without room."""

    @contextmanager
    def create(self, name: str) -> Iterator[HashingFile]:
        raise OutputError(f"disk full while writing {name}")
        yield


def test_a_full_disk_ends_the_run_and_gives_the_shards_back(kit: Any) -> None:
    kit.output.mkdir()
    with _rig(kit, storage=FullDisk(kit.output)) as rig:
        with pytest.raises(OutputError, match="disk full"):
            rig.runner.run()
        assert rig.status().shards == {"queued": 6}
        assert kit.rows() == []


def test_too_many_failed_rows_end_the_run_and_keep_what_is_done(kit: Any) -> None:
    options = RunnerOptions(max_errors=5)
    with _rig(kit, model="null:?failure_rate=0.5", options=options) as rig:
        outcome = rig.runner.run()
        assert outcome.end is RunEnd.TOO_MANY_ERRORS
        status = rig.status()
        assert status.failed > 5
        assert len(kit.rows()) == status.completed + status.failed


def test_what_the_engine_counted_reaches_the_job(kit: Any) -> None:
    with _rig(kit) as rig:
        rig.runner.run()
        status = rig.status()
        assert status.prompt_tokens == sum(row["prompt_tokens"] for row in kit.rows())
        assert status.completion_tokens == sum(row["completion_tokens"] for row in kit.rows())
        assert status.percentiles["queue_wait_s"]["p99"] is not None
