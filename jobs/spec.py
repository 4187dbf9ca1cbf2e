"""The submitted order. CLI flags, Celery kwargs and Python arguments are the field names of JobSpec.

A field added to JobSpec is an option of `gristmill run` and `submit`, and unless it is marked _HowToRun a part of
the job's identity, so that another value is another job.
Options are checked here as far as they can be without looking at files; `parse_spec` and `parse_sampling` turn
a fault into one line.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
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
from gristmill.jobs.formats import InputFormatName, OutputFormatName
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
_Task = Annotated[str, Field(pattern=r"^[\w.:-]+(@[\w.:-]+)?$", max_length=255)]


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


@dataclass(frozen=True, slots=True)
class Flag:
    """What a field is on the command line, beside its name, its type and its description, which is the help.

    only: the one command, `run` or `submit`, that takes the field. on_queue: the metavar and the help that
    `submit` shows instead.
    """

    metavar: str | None = None
    only: Literal["run", "submit"] | None = None
    on_queue: tuple[str, str] | None = None


class _HowToRun:
    """Marks a field that changes no row of the output, or that the fingerprints of inputs and model hold."""


def _say_where(schema: dict[str, Any]) -> None:
    for name, flag in flags().items():
        if flag.only is not None:
            schema["properties"][name]["description"] += f" Only of gristmill {flag.only}."


class JobSpec(BaseModel):
    """One job: which rows, which model, what to ask of it, where the results go."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, json_schema_extra=lambda schema: _say_where(schema)
    )

    input: Annotated[list[_NonEmpty], BeforeValidator(_as_list), _HowToRun, Flag("INPUT")] = Field(
        min_length=1, description="Files, globs, folders, s3://...: .jsonl, .ndjson, .gz, .zst, .parquet."
    )
    output: Annotated[_NonEmpty, _HowToRun, Flag("DIR")] = Field(
        description="Folder for part-* files and _manifest.json."
    )
    model: Annotated[
        _NonEmpty, _HowToRun, Flag("PATH", on_queue=("NAME", "The model, by the name that workers give it."))
    ] = Field(description="Hugging Face folder, GGUF file, or null: (for load tests).")
    prompt: Annotated[_NonEmpty | None, Flag("TEMPLATE")] = Field(
        default=None, description="Jinja over the row's columns."
    )
    messages: Annotated[_NonEmpty | None, Flag("COLUMN")] = Field(
        default=None, description="Column with a chat, a list of {role, content}."
    )
    system: Annotated[_NonEmpty | None, Flag("TEMPLATE")] = Field(
        default=None, description="System message, Jinja too."
    )
    max_tokens: Annotated[int | None, Flag("N")] = Field(
        default=None, ge=1, description="Most output tokens a row; default: to the end of text."
    )
    sampling: Annotated[SamplingSpec, Flag("FILE|k=v,...")] = Field(
        default=SamplingSpec(), description="temperature, top_k, top_p, min_p...; default greedy."
    )
    seed: Annotated[int, Flag("S")] = Field(
        default=0, ge=-(2**63), lt=2**63, description="Seed of the job; default 0."
    )
    stop: Annotated[list[_NonEmpty], BeforeValidator(_as_list), Flag("S")] = Field(
        default=[], description="Text at which a completion ends; repeatable."
    )
    input_format: Annotated[InputFormatName, Flag()] = Field(
        default="auto", description="Default auto, by the files' names."
    )
    output_format: Annotated[OutputFormatName, Flag()] = Field(
        default="parquet", description="Default parquet."
    )
    keep: Annotated[list[_NonEmpty], BeforeValidator(_split_columns), Flag("COLUMNS")] = Field(
        default=[], description="Input columns to copy: a,b or repeated."
    )
    limit: Annotated[int | None, Flag("N")] = Field(default=None, ge=1, description="Only the first N rows.")
    on_null: Annotated[Literal["error", "skip", "empty"], Flag()] = Field(
        default="error", description="A null in a column that the template prints; default error."
    )
    on_too_long: Annotated[Literal["error", "truncate-left", "truncate-right"], Flag()] = Field(
        default="error", description="A prompt beyond the model's context; default error."
    )
    max_errors: Annotated[_ErrorLimit | None, BeforeValidator(_as_limit_text), _HowToRun, Flag("N|P%")] = (
        Field(default=None, description="Give up beyond so many failed rows; default never.")
    )
    dtype: Annotated[Literal["auto", "bfloat16", "float32"], _HowToRun, Flag()] = Field(
        default="auto", description="Default auto: bfloat16 where the machine is fast at it."
    )
    quantization: Annotated[Literal["auto", "none", "int4", "fp8", "int8"], _HowToRun, Flag(only="run")] = (
        Field(
            default="auto",
            description="Of weights. Default auto: as the files have them; none: in the dtype; else made at load.",
        )
    )
    kv_dtype: Annotated[Literal["auto", "fp8"], _HowToRun, Flag(only="run")] = Field(
        default="auto", description="Of the KV cache; default auto: the dtype."
    )
    if_exists: Annotated[Literal["resume", "fail", "overwrite"], _HowToRun, Flag()] = Field(
        default="resume", description="What to do with an output folder that holds a job; default resume."
    )
    shard_rows: Annotated[int | None, _HowToRun, Flag("N")] = Field(
        default=None, ge=1, le=10_000_000, description="Rows in a shard; default about 30 seconds of work."
    )
    regroup: Annotated[Literal["auto", "never", "always"], _HowToRun, Flag()] = Field(
        default="auto",
        description="Sort the rows by prompt; default auto, where a sample shows that it saves 10%.",
    )
    priority: Annotated[Literal["high", "normal", "low"], _HowToRun, Flag(only="submit")] = Field(
        default="normal", description="Which job's rows go first; default normal."
    )
    not_before: Annotated[str | None, AfterValidator(_check_moment), _HowToRun, Flag("TIME", "submit")] = (
        Field(default=None, description="Start no earlier: 2026-12-01T02:00Z, or 30m, 2h, 1d.")
    )
    deadline: Annotated[str | None, AfterValidator(_check_moment), _HowToRun, Flag("TIME", "submit")] = Field(
        default=None, description="Stop then and keep what is done; written the same."
    )
    on_complete: Annotated[_Task | None, _HowToRun, Flag("TASK[@QUEUE]", "submit")] = Field(
        default=None, description="A Celery task to call at the end, until acknowledged."
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
        """
        how_to_run = {name for name, field in JobSpec.model_fields.items() if _HowToRun in field.metadata}
        return self.model_dump(mode="json", exclude=how_to_run)

    def max_num_errors(self, num_rows: int) -> int | None:
        """The most rows that may fail of `num_rows`; None is no limit."""
        if self.max_errors is None:
            return None
        if self.max_errors.endswith("%"):
            return int(num_rows * float(self.max_errors[:-1]) / 100)
        return int(self.max_errors)


def flags() -> dict[str, Flag]:
    """The fields' flags, in the order of the help."""
    found = ((name, item) for name, field in JobSpec.model_fields.items() for item in field.metadata)
    return {name: item for name, item in found if isinstance(item, Flag)}


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
        return _parse_text(text, "--sampling")
    if text.endswith((".json", ".toml")) and "=" not in text:
        return load_file(text, "--sampling")
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


def load_file(path: str, flag: str) -> Any:
    """What a JSON or TOML file holds, as its name ends. RefusedError names the flag or the file."""
    try:
        content = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RefusedError(f"{flag} {path}: can't read the file: {error}") from None
    return _parse_text(content, path, is_toml=path.endswith(".toml"))


def _parse_text(text: str, name: str, is_toml: bool = False) -> Any:
    try:
        return tomllib.loads(text) if is_toml else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{name} is not valid {'TOML' if is_toml else 'JSON'}: {error}") from None


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
