"""At the border of two shards the real engine goes on with as many rows as it can run, as if there were none."""

from __future__ import annotations

import time
from typing import Any

from gristmill.engine.config import EngineOptions
from gristmill.engine.text.tokenizer import load_tokenizer
from gristmill.jobs.owner import current_owner
from gristmill.jobs.plan.cutting import plan_shards
from gristmill.jobs.records import offer_for
from gristmill.jobs.spec import parse_spec
from gristmill.jobs.store.database import database_url
from gristmill.jobs.store.store import open_store
from gristmill.worker.engine.client import EngineClient
from gristmill.worker.engine.credit_window import credit_window
from gristmill.worker.engine.supervisor import EngineSupervisor
from gristmill.worker.local.run import load_order
from gristmill.worker.run.job_context import ContextLoader, Contexts
from gristmill.worker.run.outcome import RunEnd, RunnerOptions
from gristmill.worker.run.shard_runner import ShardRunner
from gristmill.worker.run.shard_source import ShardSource
from tests.worker.conftest import begin_run

MAX_NUM_SEQS = 8
NUM_ROWS, SHARD_ROWS = 160, 20
LOAD_S = 120.0


def test_the_rows_in_the_engine_stay_above_nine_tenths_of_what_it_can_run(
    kit: Any, smollm2_path: str
) -> None:
    rows = [{"text": f"Count to {i}."} for i in range(NUM_ROWS)]
    fields = {"input": [str(kit.write_jsonl(rows))], "output": str(kit.output), "model": smollm2_path}
    sampling = {"ignore_eos": True}
    order = load_order(parse_spec({**fields, "prompt": "{{ text }}", "max_tokens": 3, "sampling": sampling}))
    client = EngineClient(smollm2_path, EngineOptions(max_num_seqs=MAX_NUM_SEQS))
    client.start()
    samples: dict[int, int] = {}  # by step: rows that run or wait in the engine
    try:
        with open_store(database_url(None)) as store:
            plan = plan_shards(order.sources, SHARD_ROWS)
            job = begin_run(store, order, plan)
            info = client.wait_loaded(LOAD_S, lambda: False)
            contexts = Contexts(ContextLoader(store.jobs, load_tokenizer(smollm2_path), info).load)
            display = kit.new_display()
            feed = EngineSupervisor(client, credit_window(smollm2_path, info))
            runner = ShardRunner(
                store,
                ShardSource(store.claims, offer_for(job), current_owner()),
                feed,
                contexts,
                display,
                lambda: False,
                RunnerOptions(display_s=0.0),
            )
            while display.rows_done() < NUM_ROWS - 2 * MAX_NUM_SEQS:
                assert runner.run_once(time.monotonic()) is None
                counters = feed.counters
                if counters.num_steps:
                    samples[counters.num_steps] = counters.num_running + counters.num_waiting
            assert runner.run().end is RunEnd.FINISHED
    finally:
        client.kill()
    assert [row["row_index"] for row in kit.rows()] == list(range(NUM_ROWS))
    assert len(samples) >= 20
    print(
        f"{len(samples)} samples over {NUM_ROWS // SHARD_ROWS - 1} borders, at least {min(samples.values())} rows"
    )
    assert min(samples.values()) >= 0.9 * MAX_NUM_SEQS
