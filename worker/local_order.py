"""Everything that a local run knows and checks of its order before it starts an engine or writes anything."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pyarrow as pa

from engine.checkpoint import load_checkpoint, resolve_dtype
from engine.fingerprint import fingerprint
from engine.null_engine import is_null_url, parse_null_url
from jobs.identity import job_identity
from jobs.part_schema import build_part_schema
from jobs.planning import MAX_KEPT_BYTES, Plan, plan_job_shards
from jobs.prompts import PromptSource
from jobs.reading import load_columns
from jobs.sources import Source, load_sources
from jobs.spec import JobSpec

NULL_ROWS_PER_S = 10_000.0  # an engine without weights needs no learning


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
    return plan_job_shards(
        order.sources,
        spec.shard_rows,
        rows_per_s,
        spec.limit,
        keeps_columns=bool(spec.keep),
        max_kept_bytes=MAX_KEPT_BYTES,
    )


def to_absolute(spec: JobSpec) -> JobSpec:
    """The same order whatever the working directory of the next run is."""
    changes: dict[str, object] = {
        "input": [path if "://" in path else os.path.abspath(path) for path in spec.input],
        "output": spec.output if "://" in spec.output else os.path.abspath(spec.output),
    }
    if not is_null_url(spec.model):
        changes["model"] = os.path.abspath(spec.model)
    return spec.model_copy(update=changes)
