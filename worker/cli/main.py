"""The `gristmill` command: turns words into a JobSpec or a job reference and calls the part that does it.

Imports nothing heavy at module level, and never torch: `gristmill status` answers at once. The commands of the
queue are in queue.py; `bench`, `compare` and `quantize` have files of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from gristmill.jobs.spec import JobSpec
from gristmill.worker.cli.bench import bench
from gristmill.worker.cli.compare import compare
from gristmill.worker.cli.options import (
    AsJson,
    BrokerUrl,
    DatabaseUrl,
    JobReference,
    load_job,
    open_jobs,
    take_order,
)
from gristmill.worker.cli.quantize import quantize
from gristmill.worker.cli.queue import add_queue_commands
from gristmill.worker.show.console import EXIT_FAILED, forget_interrupt, print_out, run_guarded, to_json
from gristmill.worker.version import load_version

app = typer.Typer(
    name="gristmill",
    help="Grinds files of prompts into files of completions, offline, each row exactly once.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Grinds files of prompts into files of completions, offline, each row exactly once."""
    if show_version:
        print_out(f"gristmill {load_version()}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print_out(context.get_help())


@app.command()
@take_order
def run(spec: JobSpec, database_url: DatabaseUrl = None) -> int:
    """Run a job on this machine. The same command again resumes it."""
    from gristmill.worker.local.run import run_local
    from gristmill.worker.show.progress import build_display

    return run_local(spec, database_url, build_display(sys.stderr))


add_queue_commands(app)


@app.command(name="list")
def list_jobs(
    as_json: AsJson = False,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="The newest N jobs.")] = 20,
    database_url: DatabaseUrl = None,
) -> None:
    """List jobs, newest first."""
    from gristmill.worker.show.report import to_jobs_text, to_status_payload

    with open_jobs(database_url) as store:
        found = [store.jobs.status(job.job_id) for job in store.jobs.newest(limit)]
    print_out(to_json([to_status_payload(job) for job in found]) if as_json else to_jobs_text(found))


@app.command()
def status(job: JobReference, as_json: AsJson = False, database_url: DatabaseUrl = None) -> None:
    """Show a job's figures."""
    from gristmill.worker.show.report import to_status_payload, to_status_text

    with open_jobs(database_url) as store:
        found = store.jobs.status(load_job(store, job).job_id)
    print_out(to_json(to_status_payload(found)) if as_json else to_status_text(found))


@app.command()
def cancel(job: JobReference, database_url: DatabaseUrl = None) -> None:
    """Stop a job; what is done stays, and `resume` goes on with it."""
    from gristmill.jobs.client import cancel_job

    with open_jobs(database_url) as store:
        record = load_job(store, job)
        state = cancel_job(store, record.job_id)
    print_out(f"{record.job_id}: {state}")


@app.command()
def schema() -> None:
    """Print the JSON schema of a job spec."""
    print_out(to_json(JobSpec.model_json_schema()))


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(metavar="PATH", help="Check that this model can run.")] = None,
    as_json: AsJson = False,
    database_url: DatabaseUrl = None,
    broker_url: BrokerUrl = None,
) -> int:
    """Check this machine, this installation and its services."""
    from gristmill.worker.tools.doctor.run import run_checks, to_checks_payload, to_checks_text

    checks = run_checks(model, database_url, broker_url)
    print_out(to_json(to_checks_payload(checks)) if as_json else to_checks_text(checks))
    return EXIT_FAILED if any(check.state == "fail" for check in checks) else 0


app.command()(bench)
app.command()(compare)
app.command()(quantize)


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
    code = run_cli(sys.argv[1:])
    forget_interrupt()
    sys.exit(code)


if __name__ == "__main__":
    main()
