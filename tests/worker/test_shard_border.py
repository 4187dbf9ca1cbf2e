"""At the border of two shards the real engine goes on with as many rows as it can run, as if there were none."""

from __future__ import annotations

import time
from typing import Any

from engine.config import EngineOptions
from engine.tokenizer import load_tokenizer
from jobs.database import database_url
from jobs.owner import current_owner
from jobs.planning import plan_shards
from jobs.spec import load_spec
from jobs.storage import open_storage
from jobs.store import open_store
from worker.committer import Committer
from worker.credit_window import credit_window
from worker.engine_client import EngineClient
from worker.engine_feed import EngineFeed
from worker.job_context import Contexts, JobContext, OutputTarget
from worker.local_order import load_order
from worker.prepare import Preparer
from worker.prepare_ahead import PrepareAhead
from worker.run_outcome import RunEnd, RunnerOptions
from worker.shard_book import ShardBook
from worker.shard_runner import ShardRunner
from worker.shard_source import JobShards

MAX_NUM_SEQS = 8
NUM_ROWS, SHARD_ROWS = 160, 20
LOAD_S = 120.0


def test_the_rows_in_the_engine_stay_above_nine_tenths_of_what_it_can_run(
    kit: Any, smollm2_path: str
) -> None:
    rows = [{"text": f"Count to {i}."} for i in range(NUM_ROWS)]
    fields = {"input": [str(kit.write_jsonl(rows))], "output": str(kit.output), "model": smollm2_path}
    sampling = {"ignore_eos": True}
    order = load_order(load_spec({**fields, "prompt": "{{ text }}", "max_tokens": 3, "sampling": sampling}))
    client = EngineClient(smollm2_path, EngineOptions(max_num_seqs=MAX_NUM_SEQS))
    client.start()
    samples: dict[int, int] = {}  # by step: rows that run or wait in the engine
    try:
        with open_store(database_url(None)) as store:
            plan = plan_shards(order.sources, SHARD_ROWS)
            job = store.create_job(
                order.spec, order.sources, plan, order.fingerprint, order.identity, order.schema
            )
            info = client.wait_loaded(LOAD_S, lambda: False)
            tokenizer = load_tokenizer(smollm2_path)
            preparer = Preparer(order.spec, order.sources, tokenizer, order.prompt_source, info, [])
            target = OutputTarget(open_storage(order.spec.output), order.schema, "parquet", order.sources)
            contexts = Contexts(lambda _: JobContext(preparer, target))
            display = kit.new_display()
            feed = EngineFeed(client, credit_window(smollm2_path, info))
            runner = ShardRunner(
                store,
                JobShards(store, job.job_id, current_owner()),
                ShardBook(store.status(job.job_id)),
                current_owner(),
                feed,
                PrepareAhead(contexts),
                Committer(store, contexts),
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
