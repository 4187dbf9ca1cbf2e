"""A job's committed parts as one Arrow dataset, wherever they lie; nothing is read before the dataset is asked.

Arrow has an S3 client of its own; here it gets the endpoint and the credentials that boto3 has found.
"""

from __future__ import annotations

import boto3
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from gristmill.jobs.output.formats.registry import format_of_part
from gristmill.jobs.output.schema import load_part_schema
from gristmill.jobs.records import JobRecord, PartFile
from gristmill.jobs.states import JobState
from gristmill.jobs.storage.folder import Storage, open_storage
from gristmill.jobs.storage.s3.client import s3_client, split_s3_uri
from gristmill.jobs.store.shards import Shards


def load_dataset(shards: Shards, job: JobRecord) -> ds.Dataset:
    """The rows that are committed by now, completions and errors; of a job that runs there will be more."""
    storage = open_storage(job.output)
    schema = load_part_schema(job.part_schema) if job.part_schema else pa.schema([])
    is_settled = job.state is JobState.COMPLETED
    parts = [committed.part for committed in shards.committed_parts(job.job_id)]
    names = [part.path if is_settled else _find(storage, part) for part in parts if part.bytes]
    if not names:
        return ds.dataset(schema.empty_table())
    kind = format_of_part(names[0]).dataset_format
    return ds.dataset(sorted(names), schema=schema, format=kind, filesystem=_build_files(storage.root))


def _find(storage: Storage, part: PartFile) -> str:
    """Where the part's bytes are: under its own name, or still under that of its attempt."""
    is_published = storage.holds(part.path, part.attempt, part.bytes)
    return part.path if is_published or storage.size(part.attempt) is None else part.attempt


def _build_files(root: str) -> pafs.FileSystem:
    """Arrow's own file systems: a reader of ours in Arrow's threads would have to live as long as they do."""
    if not root.startswith("s3://"):
        return pafs.SubTreeFileSystem(root, pafs.LocalFileSystem())
    place = split_s3_uri(root)
    client = s3_client()
    scheme, _, host = client.meta.endpoint_url.partition("://")
    credentials = boto3.session.Session().get_credentials()
    keys = credentials.get_frozen_credentials() if credentials is not None else None
    files = pafs.S3FileSystem(
        access_key=keys.access_key if keys else None,
        secret_key=keys.secret_key if keys else None,
        session_token=keys.token if keys else None,
        anonymous=keys is None,
        region=client.meta.region_name,
        scheme=scheme,
        endpoint_override=host.rstrip("/"),
    )
    return pafs.SubTreeFileSystem(f"{place.bucket}/{place.key}", files)
