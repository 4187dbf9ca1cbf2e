"""The submitted order. CLI flags, Celery kwargs and Python arguments are the field names of JobSpec.

Options are checked here as far as they can be without looking at files; `parse_spec` and `parse_sampling` turn
a fault into one line.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.moments import parse_moment


def _split_columns(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, int)) and not isinstance(value, bool) else value


def _as_limit_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _check_moment(value: str | None) -> str | None:
    if value is not None:
        parse_moment(value, now=0.0)
    return value


_NonEmpty = Annotated[str, Field(min_length=1)]
_ErrorLimit = Annotated[str, Field(pattern=r"^(\d{1,12}|\d{1,3}(\.\d{1,6})?%)$")]


class SamplingSpec(BaseModel):
    """How tokens are chosen; the names are those of gristmill.engine.request.SamplingParams."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    temperature: float = Field(default=0.0, ge=0, le=100, description="0 is greedy")
    top_k: int = Field(default=0, ge=0, description="0 is off")
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_as_list)] = []
    ignore_eos: bool = False


class JobSpec(BaseModel):
    """One job: which rows, which model, what to ask of it, where the results go."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    input: Annotated[list[_NonEmpty], BeforeValidator(_as_list), Field(min_length=1)] = Field(
        description="files, globs or folders"
    )
    output: _NonEmpty = Field(description="folder for part-* files and _manifest.json")
    model: _NonEmpty = Field(description="model folder, .gguf file, or null:")
    prompt: _NonEmpty | None = Field(default=None, description="Jinja template over the row's columns")
    messages: _NonEmpty | None = Field(
        default=None, description="column that holds a chat: a list of {role, content}"
    )
    system: _NonEmpty | None = Field(default=None, description="Jinja template of the system message")
    max_tokens: int | None = Field(
        default=None, ge=1, description="None: to the end of text or of the context"
    )
    sampling: SamplingSpec = SamplingSpec()
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    stop: Annotated[list[_NonEmpty], BeforeValidator(_as_list)] = []
    input_format: Literal["auto", "jsonl", "parquet"] = "auto"
    output_format: Literal["parquet", "jsonl"] = "parquet"
    keep: Annotated[list[_NonEmpty], BeforeValidator(_split_columns)] = Field(
        default=[], description="input columns to copy to the output"
    )
    limit: int | None = Field(default=None, ge=1, description="only the first N rows")
    on_null: Literal["error", "skip", "empty"] = "error"
    on_too_long: Literal["error", "truncate-left", "truncate-right"] = "error"
    max_errors: Annotated[_ErrorLimit | None, BeforeValidator(_as_limit_text)] = Field(
        default=None, description="more failed rows than N or P% fail the job"
    )
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    quantization: Literal["auto", "none", "int4", "fp8", "int8"] = Field(
        default="auto", description="of weights; not on the queue, where it is the worker's"
    )
    kv_dtype: Literal["auto", "fp8"] = Field(
        default="auto", description="of the KV cache; not on the queue, where it is the worker's"
    )
    if_exists: Literal["resume", "fail", "overwrite"] = "resume"
    shard_rows: int | None = Field(default=None, ge=1, le=10_000_000)
    regroup: Literal["auto", "never", "always"] = Field(
        default="auto", description="sort the rows by prompt: auto, where a sample shows that it saves 10%"
    )
    priority: Literal["high", "normal", "low"] = Field(default="normal", description="queue only")
    not_before: Annotated[str | None, AfterValidator(_check_moment)] = Field(
        default=None,
        description="queue only: start no earlier; 2026-12-01T02:00Z, or 90s, 30m, 2h, 1d from now",
    )
    deadline: Annotated[str | None, AfterValidator(_check_moment)] = Field(
        default=None, description="queue only: stop then and keep what is done; written like not_before"
    )
    on_complete: Annotated[str, Field(pattern=r"^[\w.:-]+(@[\w.:-]+)?$", max_length=255)] | None = Field(
        default=None, description="queue only: TASK or TASK@QUEUE, a Celery task to call at the end"
    )

    @model_validator(mode="after")
    def _check_together(self) -> JobSpec:
        if self.prompt is not None and self.messages is not None:
            raise ValueError("give prompt or messages, not both")
        if len(set(self.keep)) != len(self.keep):
            raise ValueError("keep names a column twice")
        return self

    def identity_fields(self) -> dict[str, Any]:
        """Every field that can change a row of the output, as plain JSON values: the spec's share of a job's
        identity.

        Not here: inputs and model (they have fingerprints), output, dtype, quantization and kv_dtype (part of the
        model's fingerprint), and what only says how to run (max_errors, if_exists, shard_rows, regroup).
        """
        return self.model_dump(mode="json", exclude=_NOT_TEXT_FIELDS)

    def max_num_errors(self, num_rows: int) -> int | None:
        """The most rows that may fail of `num_rows`; None is no limit."""
        if self.max_errors is None:
            return None
        if self.max_errors.endswith("%"):
            return int(num_rows * float(self.max_errors[:-1]) / 100)
        return int(self.max_errors)


_NOT_TEXT_FIELDS = {
    *(
        "input",
        "output",
        "model",
        "dtype",
        "quantization",
        "kv_dtype",
        "max_errors",
        "if_exists",
        "shard_rows",
    ),
    "regroup",
    *("priority", "not_before", "deadline", "on_complete"),
}


def parse_spec(fields: Mapping[str, Any]) -> JobSpec:
    """A JobSpec from its fields. RefusedError names the field, the value and what is allowed."""
    try:
        return JobSpec.model_validate(dict(fields))
    except ValidationError as error:
        raise RefusedError(_explain(error, "", sorted(JobSpec.model_fields))) from None


def parse_sampling(text: str | None) -> SamplingSpec:
    """Sampling from `k=v,...`, a JSON object, or the path of a JSON or TOML file.

    A list is written in brackets: `stop_token_ids=[1,2]`. RefusedError names the key and the keys that exist.
    """
    if text is None or not text.strip():
        return SamplingSpec()
    try:
        return SamplingSpec.model_validate(_sampling_fields(text.strip()))
    except ValidationError as error:
        raise RefusedError(_explain(error, "sampling.", sorted(SamplingSpec.model_fields))) from None


def _sampling_fields(text: str) -> Any:
    if text.startswith("{"):
        return _load_json(text, "--sampling")
    path = Path(text)
    if path.suffix in (".json", ".toml") and "=" not in text:
        try:
            content = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise RefusedError(f"--sampling {text}: can't read the file: {error}") from None
        return _load_json(content, text) if path.suffix == ".json" else _load_toml(content, text)
    values: dict[str, Any] = {}
    for item in re.split(r",(?![^\[]*\])", text):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key:
            keys = ", ".join(sorted(SamplingSpec.model_fields))
            raise RefusedError(
                f"--sampling: {item.strip()!r} is not k=v; write e.g. temperature=0.7,top_p=0.9,"
                f" or name a .json or .toml file; the keys are {keys}"
            )
        if key in values:
            raise RefusedError(f"--sampling: {key} is given twice")
        values[key] = [v for v in value[1:-1].split(",") if v.strip()] if value.startswith("[") else value
    return values


def _load_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{name} is not valid JSON: {error}") from None


def _load_toml(text: str, name: str) -> Any:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RefusedError(f"{name} is not valid TOML: {error}") from None


def _explain(error: ValidationError, prefix: str, keys: list[str]) -> str:
    """The first fault of a validation as one line."""
    fault = error.errors(include_url=False, include_context=False)[0]
    name = prefix + ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        if len(fault["loc"]) > 1 and fault["loc"][0] == "sampling":
            keys = sorted(SamplingSpec.model_fields)
        return f"{name} is not an option; the options are {', '.join(keys)}"
    message = fault["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if name == "max_errors":
        message = "write a number of rows, or a percentage like 5%"
    if not fault["loc"]:
        return f"{prefix.rstrip('.')}: {message}" if prefix else message
    if fault["type"] == "missing":
        return f"{name} is required"
    return f"{name} is {_short(fault['input'])}: {message}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
