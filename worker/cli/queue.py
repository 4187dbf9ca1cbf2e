"""The commands of the queue: submit, worker, resume, retry, workers, migrate, clean.

What concerns a submitted job only changes the database and notifies; Celery is imported where a notifier is notified.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gristmill.engine.config import EngineOptions
from gristmill.jobs.spec import JobSpec
from gristmill.worker.cli.options import (
    AsJson,
    BrokerUrl,
    DatabaseUrl,
    JobReference,
    load_job,
    open_jobs,
    take_engine_options,
    take_order,
)
from gristmill.worker.show.console import UsageRefused, print_out, to_json

if TYPE_CHECKING:
    from gristmill.jobs.store.store import Store


def add_queue_commands(app: typer.Typer) -> None:
    """Registers the commands, in the order of the help."""
    for command in (submit, worker, resume, retry, workers, migrate, clean):
        app.command()(command)


@take_order
def submit(
    spec: JobSpec,
    idempotency_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="The same key again is the same job, not another one.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Show the progress until the job is over.")] = False,
    database_url: DatabaseUrl = None,
    broker_url: BrokerUrl = None,
) -> int:
    """Hand a job to the workers, and print its id."""
    from gristmill.jobs.client import submit_spec

    with open_jobs(database_url) as store:
        job_id = submit_spec(store, spec, idempotency_key, broker_url).job.job_id
        if wait:
            return follow(store, job_id)
        print_out(job_id)
        return 0


@take_engine_options("quantization", "kv_dtype")
def worker(
    *,
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="A model to offer; repeatable.")
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="Offer every model in this folder, or s3:// prefix; repeatable."),
    ] = None,
    max_models: Annotated[
        int, typer.Option(min=1, metavar="N", help="Models that are in memory at a time.")
    ] = 1,
    allow_uri: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROOT",
            help="Jobs read and write only below these folders and s3:// prefixes; repeatable; else"
            " GRISTMILL_ALLOW_URIS, separated by commas.",
        ),
    ] = None,
    engine_options: EngineOptions,
    database_url: DatabaseUrl = None,
    broker_url: BrokerUrl = None,
) -> int:
    """Run submitted jobs until a signal. SIGTERM hands the rows at work back within 10 s."""
    from gristmill.worker.serve.serve import WorkerOptions, run_worker

    return run_worker(
        WorkerOptions(
            models=tuple(model or ()),
            model_folders=tuple(models or ()),
            max_models=max_models,
            allow=tuple(allow_uri or ()),
            engine_options=engine_options,
            database_url=database_url,
            broker_url=broker_url,
        )
    )


def resume(job: JobReference, database_url: DatabaseUrl = None, broker_url: BrokerUrl = None) -> int:
    """Go on with a job that stopped or failed."""
    from gristmill.jobs.client import notify_workers
    from gristmill.jobs.states import Runner

    with open_jobs(database_url) as store:
        record = store.jobs.find(job)
        if record is not None and record.runner == Runner.WORKERS:
            state = store.ends.resume(record.job_id)
            notify_workers(store, record.job_id, broker_url)
            print_out(f"{record.job_id}: {state}")
            return 0
    from gristmill.worker.local.run import resume_local
    from gristmill.worker.show.progress import build_display

    return resume_local(job, database_url, build_display(sys.stderr))


def retry(job: JobReference, database_url: DatabaseUrl = None, broker_url: BrokerUrl = None) -> int:
    """Run the failed rows of a job again, and only these."""
    from gristmill.jobs.client import notify_workers
    from gristmill.jobs.states import Runner

    with open_jobs(database_url) as store:
        record = load_job(store, job)
        if record.runner == Runner.WORKERS:
            num_rows = store.ends.retry_failed(record.job_id)
            notify_workers(store, record.job_id, broker_url)
            print_out(f"{record.job_id}: {num_rows:,} failed rows run again")
            return 0
    from gristmill.worker.local.run import resume_local
    from gristmill.worker.show.progress import build_display

    return resume_local(job, database_url, build_display(sys.stderr), retry=True)


def workers(as_json: AsJson = False, database_url: DatabaseUrl = None) -> None:
    """List the workers that this database knows."""
    from gristmill.worker.show.report import to_worker_payload, to_workers_text

    with open_jobs(database_url) as store:
        found = store.workers.load_all()
    print_out(to_json([to_worker_payload(each) for each in found]) if as_json else to_workers_text(found))


def migrate(
    to: Annotated[
        str, typer.Option(metavar="REV", help="A revision, head, or base (which empties it).")
    ] = "head",
    database_url: DatabaseUrl = None,
) -> None:
    """Bring the job database's schema up, or down to a revision."""
    from gristmill.jobs.store.database import database_url as to_database_url
    from gristmill.jobs.store.database import migrate_database

    print_out(migrate_database(to_database_url(database_url), to))


def clean(
    older_than: Annotated[str, typer.Option(metavar="AGE", help="Jobs that ended so long ago: 12h, 30d.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    database_url: DatabaseUrl = None,
) -> int:
    """Forget jobs that are over. Their output files stay."""
    age_s = parse_age(older_than)
    with open_jobs(database_url) as store:
        if not yes:
            if not sys.stdin.isatty():
                raise UsageRefused("clean deletes jobs from the database: say --yes")
            typer.confirm(f"Delete every job that ended over {older_than} ago from the database?", abort=True)
        report = store.ends.clean(age_s)
    print_out(
        f"{len(report.job_ids):,} jobs and {report.num_workers:,} workers deleted; files were not touched"
    )
    return 0


def parse_age(text: str) -> float:
    """Seconds of `90s`, `30m`, `12h`, `30d`."""
    from gristmill.jobs.moments import parse_moment

    if text.strip()[-1:] not in tuple("smhd"):
        raise UsageRefused(f"--older-than {text!r} is not an age: write 90s, 30m, 12h or 30d")
    try:
        return parse_moment(text, now=0.0)
    except ValueError:
        raise UsageRefused(f"--older-than {text!r} is not an age: write 90s, 30m, 12h or 30d") from None


def follow(store: Store, job_id: str) -> int:
    """Prints the id, and the progress on stderr until the end; the exit code that `run` would have."""
    from gristmill.worker.local.follow import follow_job
    from gristmill.worker.show.progress import build_display

    return follow_job(store, job_id, build_display(sys.stderr))
