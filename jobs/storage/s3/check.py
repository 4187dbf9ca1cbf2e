"""A self-test of an S3 endpoint: not every server does what the API promises, and it is better to know at once.

Seen elsewhere: checksum trailers stored inside the object, 501 to them, conditional puts that always succeed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from gristmill.jobs.errors import OutputError, RefusedError, Unavailable
from gristmill.jobs.storage.s3.client import (
    is_missing,
    s3_client,
    s3_errors,
    split_s3_uri,
)
from gristmill.jobs.storage.s3.writer import put_object

_DATA = b"gristmill: what was put must come back"
_METADATA = {"gristmill-attempt": "_attempts/00000-1-check.parquet"}


def check_s3(root: str) -> None:
    """Tries everything that a job will ask of the endpoint in an object below `root`, and removes it.

    Raises RefusedError that says what does not work, OutputUnavailable when nobody answers.
    """
    root = root.rstrip("/")
    bucket, prefix = split_s3_uri(root)
    key = f"{prefix}/.gristmill-check-{uuid.uuid4().hex}".lstrip("/")
    client, place = s3_client(), {"Bucket": bucket, "Key": key}
    copy = {"Bucket": bucket, "Key": f"{key}-copy"}
    try:
        for what, step in _STEPS.items():
            with s3_errors(root, "output"):
                if not step(client, place, copy):
                    raise RefusedError(f"the S3 server of {root} can't be used: {what} does not work there")
    except Unavailable:
        raise
    except (OutputError, FileNotFoundError) as error:
        raise RefusedError(f"the S3 server of {root} can't be used: {what}: {error}") from error
    finally:
        for leftover in (place, copy):
            with suppress(ClientError, BotoCoreError):
                client.delete_object(**leftover)


def _check_put(client: Any, place: dict[str, str], copy: dict[str, str]) -> bool:
    put_object(client, place, _DATA, _METADATA)
    answer = client.get_object(**place)
    return bool(answer["Body"].read() == _DATA and answer["Metadata"] == _METADATA)


def _check_damage(client: Any, place: dict[str, str], copy: dict[str, str]) -> bool:
    try:
        client.put_object(**copy, Body=_DATA, ContentMD5="AAAAAAAAAAAAAAAAAAAAAA==")
    except ClientError as error:
        return 400 <= int(error.response["ResponseMetadata"]["HTTPStatusCode"]) < 500
    return False


def _check_condition(client: Any, place: dict[str, str], copy: dict[str, str]) -> bool:
    is_put = put_object(client, place, b"other bytes", {}, is_new=True)
    return not is_put and bool(client.get_object(**place)["Body"].read() == _DATA)


def _check_range(client: Any, place: dict[str, str], copy: dict[str, str]) -> bool:
    etag = client.head_object(**place)["ETag"]
    return bool(client.get_object(**place, Range="bytes=2-5", IfMatch=etag)["Body"].read() == _DATA[2:6])


def _check_copy(client: Any, place: dict[str, str], copy: dict[str, str]) -> bool:
    metadata = {"gristmill-attempt": "other"}
    client.copy_object(**copy, CopySource=place, MetadataDirective="REPLACE", Metadata=metadata)
    head = client.head_object(**copy)
    return bool(head["Metadata"] == metadata and head["ContentLength"] == len(_DATA))


def _check_list(client: Any, place: dict[str, str], copy: dict[str, str]) -> bool:
    page = client.list_objects_v2(Bucket=place["Bucket"], Prefix=place["Key"])
    return {entry["Key"] for entry in page.get("Contents", ())} == {place["Key"], copy["Key"]}


def _check_delete(client: Any, place: dict[str, str], copy: dict[str, str]) -> bool:
    client.delete_objects(Bucket=place["Bucket"], Delete={"Objects": [{"Key": place["Key"]}], "Quiet": True})
    try:
        client.head_object(**place)
    except ClientError as error:
        return is_missing(error)
    return False


_STEPS: dict[str, Callable[[Any, dict[str, str], dict[str, str]], bool]] = {
    "a put that is read back": _check_put,
    "a put with a wrong MD5 (it must be refused)": _check_damage,
    "a conditional put (If-None-Match)": _check_condition,
    "a read of a range (Range, If-Match)": _check_range,
    "a copy with new metadata": _check_copy,
    "a listing": _check_list,
    "a deletion": _check_delete,
}
