"""An order that can be carried out: its check, which changes nothing, and its shards."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.identity import job_identity
from gristmill.jobs.input.reading import is_typed, load_columns
from gristmill.jobs.input.sources import load_sources
from gristmill.jobs.output.schema import build_part_schema
from gristmill.jobs.plan.cutting import MAX_KEPT_BYTES, MIN_SHARD_ROWS, plan_job_shards
from gristmill.jobs.prompt.source import PromptSource
from gristmill.jobs.source import Plan, Source
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.storage.allowed import check_allowed
from gristmill.jobs.storage.folder import is_s3

MIN_SHARD_S = 1.0
_MIN_PREFIX_SIZE = 16


@dataclass(frozen=True, slots=True)
class Order:
    """What was found out about a job's order."""

    spec: JobSpec
    sources: Sequence[Source]
    columns: Sequence[str]  # names of the input's columns
    part_schema: bytes
    fingerprint: str  # of the model; "": workers map its name to weights
    identity: str


def check_order(spec: JobSpec, fingerprint: str = "", allow: Sequence[str] | None = None) -> Order:
    """Reads heads of inputs. Inputs and output must lie below `allow`; None: anywhere. Raises RefusedError."""
    if allow is not None:
        check_allowed([*spec.input, spec.output], allow)
    if "://" in spec.output and not is_s3(spec.output):
        raise RefusedError(f"output {spec.output!r}: write a path, or s3://BUCKET/FOLDER")
    sources = load_sources(spec.input, spec.input_format, spec.output)
    if allow is not None:
        check_allowed([source.uri for source in sources], allow)
    columns = load_columns(sources)
    PromptSource(spec, columns)
    return Order(
        spec=spec,
        sources=sources,
        columns=list(columns),
        part_schema=build_part_schema(spec.keep, columns, is_typed(sources)).serialize().to_pybytes(),
        fingerprint=fingerprint,
        identity=job_identity(sources, spec, fingerprint or f"{spec.model}:{spec.dtype}"),
    )


def plan_order(order: Order, rows_per_s: float | None, min_shards: int = 1) -> Plan:
    """The shards: of about 30 seconds of work, less where large rows are kept, or where there would be fewer than
    `min_shards`.
    """
    spec, keeps = order.spec, bool(order.spec.keep)
    plan = plan_job_shards(
        order.sources,
        spec.shard_rows,
        rows_per_s,
        spec.limit,
        keeps_columns=keeps,
        max_kept_bytes=MAX_KEPT_BYTES,
    )
    fewer = max(MIN_SHARD_ROWS, plan.num_rows // min_shards, int(MIN_SHARD_S * (rows_per_s or 0.0)))
    if spec.shard_rows is not None or len(plan.shards) >= min_shards:
        return plan
    if max(shard.num_rows for shard in plan.shards) <= fewer:
        return plan
    return plan_job_shards(
        order.sources, fewer, None, spec.limit, keeps_columns=keeps, max_kept_bytes=MAX_KEPT_BYTES
    )


def build_prefix_key(spec: JobSpec) -> str | None:
    """Equal for jobs whose prompts begin with the same text, as far as the templates tell; None: they don't."""
    system, is_whole = _fixed_head(spec.system or "")
    head = system + "\0" + _fixed_head(spec.prompt or "")[0] if is_whole else system
    if len(head) < _MIN_PREFIX_SIZE:
        return None
    return hashlib.sha256(f"{spec.model}\0{head}".encode()).hexdigest()[:32]


def _fixed_head(template: str) -> tuple[str, bool]:
    """A template up to its first tag, and whether that is all of it."""
    tags = [index for tag in ("{{", "{%", "{#") if (index := template.find(tag)) >= 0]
    return (template[: min(tags)], False) if tags else (template, True)
