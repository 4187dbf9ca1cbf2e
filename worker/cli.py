"""The `gristmill` command: turns words into a JobSpec or a job reference and calls the part that does it.

Imports nothing heavy at module level, and never torch: `gristmill status` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from worker.console import EXIT_FAILED, UsageRefused, print_out, run_guarded, to_json

if TYPE_CHECKING:
    from jobs.records import JobRecord
    from jobs.spec import JobSpec
    from jobs.store import Store

app = typer.Typer(
    name="gristmill",
    help="Grinds files of prompts into files of completions, offline, each row exactly once.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Job database; else GRISTMILL_DATABASE_URL, else SQLite in the user's state folder.",
    ),
]
JobReference = Annotated[str, typer.Argument(metavar="JOB|DIR", help="A job's id or its output folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        print_out(f"gristmill {load_version()}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print_out(context.get_help())


@app.command()
def run(
    input: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT", help="Files, globs or folders: .jsonl, .ndjson, .gz, .zst, .parquet."
        ),
    ],
    output: Annotated[str, typer.Option(metavar="DIR", help="Folder for part-* files and _manifest.json.")],
    model: Annotated[
        str,
        typer.Option(metavar="PATH", help="Hugging Face folder, GGUF file, or null: (for load tests)."),
    ],
    prompt: Annotated[
        str | None, typer.Option(metavar="TEMPLATE", help="Jinja over the row's columns.")
    ] = None,
    prompt_file: Annotated[str | None, typer.Option(metavar="F", help="The same, read from a file.")] = None,
    messages: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column with a chat, a list of {role, content}.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEMPLATE", help="System message, Jinja too.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Most output tokens a row; default: to the end of text.")
    ] = None,
    sampling: Annotated[
        str | None,
        typer.Option(metavar="FILE|k=v,...", help="temperature, top_k, top_p, min_p...; default greedy."),
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="S", help="Seed of the job; default 0.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="S", help="Text at which a completion ends; repeatable.")
    ] = None,
    input_format: Annotated[
        Literal["auto", "jsonl", "parquet"] | None, typer.Option(help="Default auto, by the files' names.")
    ] = None,
    output_format: Annotated[
        Literal["parquet", "jsonl"] | None, typer.Option(help="Default parquet.")
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="COLUMNS", help="Input columns to copy: a,b or repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Only the first N rows.")] = None,
    on_null: Annotated[
        Literal["error", "skip", "empty"] | None,
        typer.Option(help="A null in a column that the template prints; default error."),
    ] = None,
    on_too_long: Annotated[
        Literal["error", "truncate-left", "truncate-right"] | None,
        typer.Option(help="A prompt beyond the model's context; default error."),
    ] = None,
    max_errors: Annotated[
        str | None, typer.Option(metavar="N|P%", help="Give up beyond so many failed rows; default never.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"] | None,
        typer.Option(help="Default auto: bfloat16 where the machine is fast at it."),
    ] = None,
    if_exists: Annotated[
        Literal["resume", "fail", "overwrite"] | None,
        typer.Option(help="What to do with an output folder that holds a job; default resume."),
    ] = None,
    shard_rows: Annotated[
        int | None, typer.Option(metavar="N", help="Rows in a shard; default about 30 seconds of work.")
    ] = None,
    database_url: DatabaseUrl = None,
) -> int:
    """Run a job on this machine. The same command again resumes it."""
    from worker.local_run import run_local
    from worker.progress import build_display

    flags: dict[str, Any] = {
        "input": input, "output": output, "model": model, "messages": messages, "system": system,
        "prompt": load_prompt(prompt, prompt_file, messages), "max_tokens": max_tokens, "seed": seed,
        "stop": stop, "input_format": input_format, "output_format": output_format, "limit": limit,
        "on_null": on_null, "on_too_long": on_too_long, "max_errors": max_errors, "dtype": dtype,
        "if_exists": if_exists, "shard_rows": shard_rows,
    }  # fmt: skip
    if keep:
        flags["keep"] = [name.strip() for text in keep for name in text.split(",") if name.strip()]
    return run_local(build_spec(flags, sampling), database_url, build_display(sys.stderr))


@app.command(name="list")
def list_jobs(
    as_json: AsJson = False,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="The newest N jobs.")] = 20,
    database_url: DatabaseUrl = None,
) -> None:
    """List jobs, newest first."""
    from worker.report import to_jobs_text, to_status_payload

    with open_jobs(database_url) as store:
        found = [store.status(job.job_id) for job in store.list_jobs(limit)]
    if as_json:
        print_out(to_json([to_status_payload(job, is_live=job.owner is not None) for job in found]))
    else:
        print_out(to_jobs_text(found))


@app.command()
def status(job: JobReference, as_json: AsJson = False, database_url: DatabaseUrl = None) -> None:
    """Show a job's figures."""
    from worker.report import to_status_payload, to_status_text

    with open_jobs(database_url) as store:
        found = store.status(load_job(store, job).job_id)
    live = found.owner is not None
    print_out(to_json(to_status_payload(found, live)) if as_json else to_status_text(found, live))


@app.command()
def resume(job: JobReference, database_url: DatabaseUrl = None) -> int:
    """Go on with a job that was interrupted, cancelled or failed."""
    from worker.local_run import resume_local
    from worker.progress import build_display

    return resume_local(job, database_url, build_display(sys.stderr))


@app.command()
def cancel(job: JobReference, database_url: DatabaseUrl = None) -> None:
    """Stop a job; what is done stays, and `resume` goes on with it."""
    from jobs.states import JobState

    with open_jobs(database_url) as store:
        record = load_job(store, job)
        state = store.request_cancel(record.job_id)
        if state == JobState.CANCELLING and store.finish_cancel(record.job_id):
            state = JobState.CANCELLED
    print_out(f"{record.job_id}: {state}")


@app.command()
def schema() -> None:
    """Print the JSON schema of a job spec."""
    from jobs.spec import JobSpec

    print_out(to_json(JobSpec.model_json_schema()))


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(metavar="PATH", help="Check that this model can run.")] = None,
    as_json: AsJson = False,
    database_url: DatabaseUrl = None,
) -> int:
    """Check this machine and this installation."""
    from worker.doctor import run_checks, to_checks_payload, to_checks_text

    checks = run_checks(model, database_url)
    print_out(to_json(to_checks_payload(checks)) if as_json else to_checks_text(checks))
    return EXIT_FAILED if any(check.state == "fail" for check in checks) else 0


def build_spec(flags: dict[str, Any], sampling: str | None) -> JobSpec:
    """The JobSpec of the flags that were given; RefusedError says which one is wrong."""
    from jobs.spec import load_spec, parse_sampling

    given = {name: value for name, value in flags.items() if value is not None}
    if sampling is not None:
        given["sampling"] = parse_sampling(sampling)
    return load_spec(given)


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
    from jobs.database import database_url
    from jobs.store import open_store

    return open_store(database_url(url))


def load_job(store: Store, reference: str) -> JobRecord:
    """The job that the reference names: an id, the beginning of one, or an output folder."""
    job = store.find_job(reference)
    if job is None:
        raise UsageRefused(f"no job {reference!r} in this database: `gristmill list` shows those there are")
    return job


def load_version() -> str:
    try:
        return version("gristmill")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "(not installed)"


def run_cli(words: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    command = typer.main.get_command(app)
    return run_guarded(
        lambda: int(command.main(args=list(words), prog_name="gristmill", standalone_mode=False) or 0)
    )


def main() -> None:
    """The console script."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is: any path can be printed
    sys.exit(run_cli(sys.argv[1:]))


if __name__ == "__main__":
    main()
