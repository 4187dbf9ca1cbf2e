"""Everything that a local run knows and checks of its order before it starts an engine or writes anything."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from engine.checkpoint import load_checkpoint, resolve_dtype
from engine.fingerprint import fingerprint
from engine.null_engine import is_null_url, parse_null_url
from jobs.identity import job_identity
from jobs.part_schema import build_part_schema
from jobs.planning import Plan, plan_shards
from jobs.prompts import PromptSource
from jobs.reading import load_columns
from jobs.sources import Source, load_sources
from jobs.spec import JobSpec

NULL_ROWS_PER_S = 10_000.0  # an engine without weights needs no learning
MAX_KEPT_BYTES = 32 << 20  # of a shard whose columns are kept: its rows are in memory until it is committed


@dataclass(frozen=True, slots=True)
class LocalOrder:
    """A job spec that can be run here, and what was found out about it."""

    spec: JobSpec  # with absolute paths
    sources: list[Source]
    prompt_source: PromptSource
    schema: pa.Schema  # of the parts
    fingerprint: str
    identity: str

    @property
    def assumed_rows_per_s(self) -> float | None:
        """The rate to plan with where none was learned."""
        if not is_null_url(self.spec.model):
            return None
        delay_s = parse_null_url(self.spec.model).delay_s
        return min(NULL_ROWS_PER_S, 1.0 / delay_s) if delay_s else NULL_ROWS_PER_S


def load_order(spec: JobSpec) -> LocalOrder:
    """Reads heads of inputs and headers of the model; raises RefusedError or ModelRefused, writes nothing."""
    spec = to_absolute(spec)
    sources = load_sources(spec.input, spec.input_format, spec.output)
    columns = load_columns(sources)
    prompt_source = PromptSource(spec, columns)
    any_jsonl = any(source.format == "jsonl" for source in sources)
    schema = build_part_schema(spec.keep, columns, any_jsonl)
    if is_null_url(spec.model):
        parse_null_url(spec.model)
    else:
        load_checkpoint(spec.model)
    model_fingerprint = fingerprint(spec.model, resolve_dtype(spec.dtype))
    return LocalOrder(
        spec=spec,
        sources=sources,
        prompt_source=prompt_source,
        schema=schema,
        fingerprint=model_fingerprint,
        identity=job_identity(sources, spec, model_fingerprint),
    )


def plan_order(order: LocalOrder, learned_rows_per_s: float | None) -> Plan:
    """The shards of a new job: about 30 seconds of work, less where large rows are kept."""
    spec = order.spec
    rows_per_s = learned_rows_per_s or order.assumed_rows_per_s
    plan = plan_shards(order.sources, spec.shard_rows, rows_per_s, spec.limit)
    if not spec.keep or spec.shard_rows is not None:
        return plan
    jsonl_sizes = (shard.byte_size / max(1, shard.num_rows) for shard in plan.shards)  # Parquet: 0 bytes
    parquet_sizes = (load_row_bytes(source.uri) for source in order.sources if source.format == "parquet")
    row_bytes = max(itertools.chain(jsonl_sizes, parquet_sizes))
    if row_bytes * max(shard.num_rows for shard in plan.shards) <= MAX_KEPT_BYTES:
        return plan
    return plan_shards(order.sources, max(1, int(MAX_KEPT_BYTES / row_bytes)), None, spec.limit)


def load_row_bytes(parquet_path: str) -> float:
    """The mean size of a row of a Parquet file, decompressed, by its footer."""
    metadata = pq.read_metadata(parquet_path)
    num_bytes = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return float(num_bytes / max(1, metadata.num_rows))


def to_absolute(spec: JobSpec) -> JobSpec:
    """The same order whatever the working directory of the next run is."""
    changes: dict[str, object] = {
        "input": [path if "://" in path else os.path.abspath(path) for path in spec.input],
        "output": os.path.abspath(spec.output),
    }
    if not is_null_url(spec.model):
        changes["model"] = os.path.abspath(spec.model)
    return spec.model_copy(update=changes)
