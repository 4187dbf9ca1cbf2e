"""The fields of JobSpec as keyword arguments, so that a type checker finds a misspelt one."""

from collections.abc import Mapping
from typing import Any, Literal, Required, TypedDict

from gristmill.jobs.formats import InputFormatName, OutputFormatName


class JobFields(TypedDict, total=False):
    """What `gristmill.run` and `gristmill.submit` take: the fields of jobs.spec.JobSpec, which says what each means."""

    input: Required[str | list[str]]
    output: Required[str]
    model: Required[str]
    prompt: str | None
    messages: str | None
    system: str | None
    max_tokens: int | None
    sampling: Mapping[str, Any]
    seed: int
    stop: str | list[str]
    input_format: InputFormatName
    output_format: OutputFormatName
    keep: str | list[str]
    limit: int | None
    on_null: Literal["error", "skip", "empty"]
    on_too_long: Literal["error", "truncate-left", "truncate-right"]
    max_errors: str | int | None
    dtype: Literal["auto", "bfloat16", "float32"]
    quantization: Literal["auto", "none", "int4", "fp8", "int8"]
    kv_dtype: Literal["auto", "fp8"]
    if_exists: Literal["resume", "fail", "overwrite"]
    shard_rows: int | None
    regroup: Literal["auto", "never", "always"]
    priority: Literal["high", "normal", "low"]
    not_before: str | None
    deadline: str | None
    on_complete: str | None
