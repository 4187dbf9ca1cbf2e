"""The options that several commands share, each written once: `run` and `submit` take the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gristmill.worker.show.console import UsageRefused

if TYPE_CHECKING:
    from gristmill.jobs.records import JobRecord
    from gristmill.jobs.spec import JobSpec
    from gristmill.jobs.store.store import Store

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Job database; else GRISTMILL_DATABASE_URL, else SQLite in the user's state folder.",
    ),
]
BrokerUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="Redis as redis://HOST:PORT/N; else GRISTMILL_BROKER_URL.")
]
JobReference = Annotated[str, typer.Argument(metavar="JOB|DIR", help="A job's id or its output folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# The fields of a JobSpec.
Input = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT", help="Files, globs, folders, s3://...: .jsonl, .ndjson, .gz, .zst, .parquet."
    ),
]
Output = Annotated[str, typer.Option(metavar="DIR", help="Folder for part-* files and _manifest.json.")]
Model = Annotated[
    str, typer.Option(metavar="PATH", help="Hugging Face folder, GGUF file, or null: (for load tests).")
]
ModelName = Annotated[str, typer.Option(metavar="NAME", help="The model, by the name that workers give it.")]
Prompt = Annotated[str | None, typer.Option(metavar="TEMPLATE", help="Jinja over the row's columns.")]
PromptFile = Annotated[str | None, typer.Option(metavar="F", help="The same, read from a file.")]
Messages = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="Column with a chat, a list of {role, content}.")
]
System = Annotated[str | None, typer.Option(metavar="TEMPLATE", help="System message, Jinja too.")]
MaxTokens = Annotated[
    int | None, typer.Option(metavar="N", help="Most output tokens a row; default: to the end of text.")
]
Sampling = Annotated[
    str | None,
    typer.Option(metavar="FILE|k=v,...", help="temperature, top_k, top_p, min_p...; default greedy."),
]
Seed = Annotated[int | None, typer.Option(metavar="S", help="Seed of the job; default 0.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="S", help="Text at which a completion ends; repeatable.")
]
InputFormat = Annotated[
    Literal["auto", "jsonl", "parquet"] | None, typer.Option(help="Default auto, by the files' names.")
]
OutputFormat = Annotated[Literal["parquet", "jsonl"] | None, typer.Option(help="Default parquet.")]
Keep = Annotated[
    list[str] | None, typer.Option(metavar="COLUMNS", help="Input columns to copy: a,b or repeated.")
]
Limit = Annotated[int | None, typer.Option(metavar="N", help="Only the first N rows.")]
OnNull = Annotated[
    Literal["error", "skip", "empty"] | None,
    typer.Option(help="A null in a column that the template prints; default error."),
]
OnTooLong = Annotated[
    Literal["error", "truncate-left", "truncate-right"] | None,
    typer.Option(help="A prompt beyond the model's context; default error."),
]
MaxErrors = Annotated[
    str | None, typer.Option(metavar="N|P%", help="Give up beyond so many failed rows; default never.")
]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float32"] | None,
    typer.Option(help="Default auto: bfloat16 where the machine is fast at it."),
]
Quantization = Annotated[
    Literal["auto", "none", "int4", "fp8", "int8"] | None,
    typer.Option(
        help="Of weights. Default auto: as the files have them; none: in the dtype; else made at load."
    ),
]
KVDtype = Annotated[
    Literal["auto", "fp8"] | None,
    typer.Option("--kv-dtype", help="Of the KV cache; default auto: the dtype."),
]
IfExists = Annotated[
    Literal["resume", "fail", "overwrite"] | None,
    typer.Option(help="What to do with an output folder that holds a job; default resume."),
]
ShardRows = Annotated[
    int | None, typer.Option(metavar="N", help="Rows in a shard; default about 30 seconds of work.")
]
Regroup = Annotated[
    Literal["auto", "never", "always"] | None,
    typer.Option(help="Sort the rows by prompt; default auto, where a sample shows that it saves 10%."),
]
Priority = Annotated[
    Literal["high", "normal", "low"] | None, typer.Option(help="Which job's rows go first; default normal.")
]
NotBefore = Annotated[
    str | None, typer.Option(metavar="TIME", help="Start no earlier: 2026-12-01T02:00Z, or 30m, 2h, 1d.")
]
Deadline = Annotated[
    str | None, typer.Option(metavar="TIME", help="Stop then and keep what is done; written the same.")
]
OnComplete = Annotated[
    str | None,
    typer.Option(metavar="TASK[@QUEUE]", help="A Celery task to call at the end, until acknowledged."),
]


def build_spec(
    fields: dict[str, Any], sampling: str | None, prompt_file: str | None, keep: list[str] | None
) -> JobSpec:
    """The JobSpec of the options that were given; RefusedError says which one is wrong."""
    from gristmill.jobs.spec import parse_sampling, parse_spec

    prompt = load_prompt(fields["prompt"], prompt_file, fields["messages"])
    given = {name: value for name, value in (fields | {"prompt": prompt}).items() if value is not None}
    if keep:
        given["keep"] = [name.strip() for text in keep for name in text.split(",") if name.strip()]
    if sampling is not None:
        given["sampling"] = parse_sampling(sampling)
    return parse_spec(given)


def load_prompt(prompt: str | None, prompt_file: str | None, messages: str | None) -> str | None:
    """The prompt template from whichever flag holds it; at most one of the three may be given."""
    flags = {"--prompt": prompt, "--prompt-file": prompt_file, "--messages": messages}
    given = [flag for flag, value in flags.items() if value is not None]
    if len(given) > 1:
        raise UsageRefused(f"{' and '.join(given)} exclude each other: give one of them")
    if prompt_file is None:
        return prompt
    try:
        with open(prompt_file, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise UsageRefused(f"--prompt-file {prompt_file}: {error.strerror}: give a readable file") from error
    except UnicodeDecodeError as error:
        message = f"--prompt-file {prompt_file} is not UTF-8 at byte {error.start}: convert it"
        raise UsageRefused(message) from error


def open_jobs(url: str | None) -> Store:
    """The store of the flag or of the environment."""
    from gristmill.jobs.store.database import database_url
    from gristmill.jobs.store.store import open_store

    return open_store(database_url(url))


def load_job(store: Store, reference: str) -> JobRecord:
    """The job that the reference names: an id, the beginning of one, or an output folder."""
    job = store.jobs.find(reference)
    if job is None:
        raise UsageRefused(f"no job {reference!r} in this database: `gristmill list` shows those there are")
    return job
