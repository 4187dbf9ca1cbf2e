"""What a runner needs to know of a job to work on its shards: how rows become requests, where parts go.

Loaded once a job and process, by the thread that prepares rows; kept for the jobs that were used last.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from gristmill.engine.request import EngineInfo
from gristmill.engine.text.tokenizer import Tokenizer
from gristmill.jobs.input.reading import load_columns
from gristmill.jobs.output.schema import load_part_schema
from gristmill.jobs.prompt.source import PromptSource
from gristmill.jobs.source import Source
from gristmill.jobs.spec import parse_spec
from gristmill.jobs.storage.allowed import check_allowed
from gristmill.jobs.storage.folder import Storage, open_storage
from gristmill.jobs.store.jobs import Jobs
from gristmill.worker.run.prepare import Preparer

MAX_CONTEXTS = 32


@dataclass(frozen=True, slots=True)
class OutputTarget:
    """Where a job's parts go and what they look like."""

    storage: Storage
    schema: pa.Schema
    output_format: str
    sources: Sequence[Source]


@dataclass(frozen=True, slots=True)
class JobContext:
    """One job, ready to be worked on."""

    preparer: Preparer
    target: OutputTarget
    max_errors: int | None = None  # of a job of the queue; more failed rows stop it
    prefix_key: str | None = None


class Contexts:
    """The contexts of the jobs at hand, for all threads of a runner. `load` may raise JobsError."""

    def __init__(self, load: Callable[[str], JobContext]) -> None:
        self._load = load
        self._contexts: OrderedDict[str, JobContext] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, job_id: str) -> JobContext:
        """The job's context, loaded if need be."""
        with self._lock:
            context = self._contexts.get(job_id)
            if context is None:
                context = self._contexts[job_id] = self._load(job_id)
                if len(self._contexts) > MAX_CONTEXTS:
                    self._contexts.popitem(last=False)
            else:
                self._contexts.move_to_end(job_id)
            return context

    def prefix_keys(self) -> set[str]:
        """Of these jobs, as far as they have one."""
        contexts = list(self._contexts.values())
        return {context.prefix_key for context in contexts if context.prefix_key is not None}


class ContextLoader:
    """Loads contexts of jobs from the database. RefusedError for one that may not run here.

    `allow`: the roots of a job of the queue; None for a run, which counts its failed rows itself.
    """

    def __init__(
        self, jobs: Jobs, tokenizer: Tokenizer, info: EngineInfo, allow: Sequence[str] | None = None
    ) -> None:
        self._jobs = jobs
        self._tokenizer = tokenizer
        self._info = info
        self._allow = allow

    def load(self, job_id: str) -> JobContext:
        """The context of one job."""
        job = self._jobs.load(job_id)
        spec = parse_spec({name: value for name, value in job.spec.items() if value is not None})
        if self._allow is not None:
            check_allowed([*(source.uri for source in job.sources), job.output], self._allow)
        columns = job.columns or load_columns(job.sources)
        prompts = PromptSource(spec, columns)
        return JobContext(
            preparer=Preparer(spec, job.sources, self._tokenizer, prompts, self._info, spec.keep),
            target=OutputTarget(
                open_storage(job.output), load_part_schema(job.part_schema), spec.output_format, job.sources
            ),
            max_errors=None if self._allow is None else spec.max_num_errors(job.num_rows),
            prefix_key=job.prefix_key,
        )
