"""Puts into S3 that are whole or nothing: an MD5 with every request, no unfinished upload left behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from botocore.exceptions import BotoCoreError, ClientError

from gristmill.jobs.storage.s3.client import (
    error_code,
    is_damaged,
    is_missing,
    is_refused_condition,
    to_md5,
)

PART_BYTES = 16 << 20
_DAMAGE_TRIES = 4


def put_object(
    client: Any, place: Mapping[str, str], data: bytes, metadata: Mapping[str, str], *, is_new: bool = False
) -> bool:
    """Puts `data` at place (Bucket and Key). What was damaged on the way is sent again.

    `is_new`: only where nothing is yet. False: 412 was the answer. It may be that to our own success whose reply
    was lost, so the bytes that are there decide.
    """
    digest, condition = to_md5(data), {"IfNoneMatch": "*"} if is_new else {}
    try:
        _send(
            lambda: client.put_object(**place, Body=data, ContentMD5=digest, Metadata=metadata, **condition)
        )
    except ClientError as error:
        if not is_new or not is_refused_condition(error):
            raise
        return False
    return True


def put_file(
    client: Any, place: Mapping[str, str], file: BinaryIO, size: int, metadata: Mapping[str, str]
) -> None:
    """Puts an open file of that size, a large one by parts."""
    if size <= PART_BYTES:
        put_object(client, place, file.read(), metadata)
    else:
        _put_parts(client, place, file, metadata)


def _put_parts(client: Any, place: Mapping[str, str], file: BinaryIO, metadata: Mapping[str, str]) -> None:
    """On any failure, KeyboardInterrupt too, the upload is aborted."""
    upload_id = client.create_multipart_upload(**place, Metadata=metadata)["UploadId"]
    is_whole = False
    try:
        parts = []
        for number in itertools.count(1):
            data = file.read(PART_BYTES)
            if not data:
                break
            parts.append({"PartNumber": number, "ETag": _put_part(client, place, upload_id, number, data)})
        client.complete_multipart_upload(**place, UploadId=upload_id, MultipartUpload={"Parts": parts})
        is_whole = True
    except ClientError as error:
        # Where the reply to the completion was lost, its repetition finds no upload any more.
        if error_code(error) != "NoSuchUpload" or not _is_there(client, place, metadata):
            raise
        is_whole = True
    finally:
        if not is_whole:
            with suppress(ClientError, BotoCoreError):  # the sweep takes what is left
                client.abort_multipart_upload(**place, UploadId=upload_id)


def _put_part(client: Any, place: Mapping[str, str], upload_id: str, number: int, data: bytes) -> str:
    part = {"UploadId": upload_id, "PartNumber": number, "ContentMD5": to_md5(data)}
    return str(_send(lambda: client.upload_part(**place, **part, Body=data))["ETag"])


def _send(request: Callable[[], Any]) -> Any:
    """Damage is not among what botocore tries again."""
    for _ in range(_DAMAGE_TRIES - 1):
        try:
            return request()
        except ClientError as error:
            if not is_damaged(error):
                raise
    return request()


def _is_there(client: Any, place: Mapping[str, str], metadata: Mapping[str, str]) -> bool:
    try:
        return bool(client.head_object(**place)["Metadata"] == metadata)
    except ClientError as error:
        if is_missing(error):
            return False
        raise
