"""The way to S3 and its like: one client a process, its errors in our words.

Endpoint, credentials and region are boto3's own settings (AWS_ENDPOINT_URL and so on), never a job's.
"""

from __future__ import annotations

import base64
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ChecksumError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
)
from botocore.parsers import ResponseParserError

from gristmill.jobs.errors import (
    JobsError,
    OutputError,
    OutputUnavailable,
    RefusedError,
    SourceError,
    SourceUnavailable,
)

MAX_TRIES = 10
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 60
MAX_CONNECTIONS = 64
_DAMAGED_CODES = frozenset({"BadDigest", "IncompleteBody", "InvalidDigest", "XAmzContentSHA256Mismatch"})
# Answers after which the same request may succeed, whatever their HTTP status: the server is busy, bytes
# were damaged on the way, or somebody else was at work on the same key.
_PASSING_CODES = _DAMAGED_CODES | {
    "ConditionalRequestConflict",
    "ExpiredToken",
    "NoSuchUpload",
    "OperationAborted",
    "RequestTimeTooSkewed",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
# The same without an answer: no connection, half a body, credentials that a service hands out.
_PASSING_ERRORS = (
    ChecksumError,
    ConnectionError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
    ResponseParserError,
)
_CLIENT_VARIABLES = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_PROFILE",
    "AWS_ACCESS_KEY_ID",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
)
_clients: dict[tuple[str | None, ...], Any] = {}
_clients_lock = threading.Lock()

Kind = Literal["source", "output"]


class S3Uri(NamedTuple):
    """s3://bucket/key; the key may be empty."""

    bucket: str
    key: str


def s3_client() -> Any:
    """The boto3 client of this process for the present settings; safe for several threads.

    Raises RefusedError when the settings make no client.
    """
    settings = tuple(os.environ.get(name) for name in _CLIENT_VARIABLES)
    with _clients_lock:
        if settings not in _clients:
            _clients[settings] = _build_client()
        return _clients[settings]


def split_s3_uri(uri: str) -> S3Uri:
    """The bucket and the key of `s3://bucket/key`. Raises RefusedError.

    Some servers keep keys as paths and resolve `..`, which would lead out of an allowed prefix.
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise RefusedError(f"{uri!r} is no place in S3: write s3://BUCKET/KEY")
    if not {".", ".."}.isdisjoint((bucket, *key.split("/"))):
        raise RefusedError(f"{uri!r} has a `.` or `..` between slashes: write the key in full")
    return S3Uri(bucket, key)


def is_missing(error: ClientError) -> bool:
    """Whether the answer says that there is no such key (a HEAD has no body: there, no bucket either)."""
    return _status(error) == 404 and error_code(error) in ("404", "NoSuchKey", "NotFound")


def is_damaged(error: ClientError) -> bool:
    """Whether the server got other bytes than were sent."""
    return error_code(error) in _DAMAGED_CODES


def is_refused_condition(error: ClientError) -> bool:
    """Whether an If-Match or If-None-Match did not hold."""
    return _status(error) == 412


@contextmanager
def s3_errors(place: str, kind: Kind) -> Iterator[None]:
    """Turns botocore's errors into SourceError, OutputError or their Unavailable kinds, naming `place`.

    A missing key comes through as the FileNotFoundError that a file would give.
    """
    try:
        yield
    except ClientError as error:
        if is_missing(error):
            raise FileNotFoundError(f"{place} is missing") from error
        raise _to_ours(place, kind, error) from error
    except (BotoCoreError, ResponseParserError) as error:
        raise _to_ours(place, kind, error) from error
    except (ValueError, KeyError) as error:
        # An answer that was damaged on the way: botocore trusts its dates and numbers, and we its fields.
        raise _unavailable(place, kind, f"its answer makes no sense: {type(error).__name__}") from error


def error_code(error: ClientError) -> str:
    """The server's own word for the error: NoSuchKey, AccessDenied, ..."""
    return str(error.response.get("Error", {}).get("Code", ""))


def _to_ours(place: str, kind: Kind, error: Exception) -> JobsError:
    if _may_pass(error):
        return _unavailable(place, kind, _reason(error))
    ours = SourceError if kind == "source" else OutputError
    return ours(f"can't use {place} ({_reason(error)}): check the bucket, the credentials and the endpoint")


def _unavailable(place: str, kind: Kind, reason: str) -> JobsError:
    unavailable = SourceUnavailable if kind == "source" else OutputUnavailable
    return unavailable(f"can't reach {place} now ({reason}): tried again until it answers")


def _may_pass(error: Exception) -> bool:
    if isinstance(error, ClientError):
        status = _status(error)
        return status == 429 or (status >= 500 and status != 501) or error_code(error) in _PASSING_CODES
    return isinstance(error, _PASSING_ERRORS)


def _reason(error: Exception) -> str:
    """One line without URLs: an endpoint may hold a password."""
    if isinstance(error, ClientError):
        message = str(error.response.get("Error", {}).get("Message") or "").split("\n")[0][:200]
        return f"{_status(error)} {error_code(error)}" + (f": {message}" if message else "")
    return type(error).__name__


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _build_client() -> Any:
    try:
        session = boto3.session.Session()
        client = session.client("s3", config=_build_config())
        host = client.meta.endpoint_url.partition("://")[2].partition("/")[0]
        if host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
            return client
        client.close()
        # Other servers: some answer 501 to checksum trailers, some store them in the object; and few have
        # a host name for every bucket.
        chosen = session._session.get_scoped_config().get("s3") or {}
        style = {} if "addressing_style" in chosen else {"s3": {"addressing_style": "path"}}
        plain = Config(
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            **style,
        )
        client = session.client("s3", config=_build_config().merge(plain))
        client.meta.events.register("before-sign.s3.DeleteObjects", _add_md5)
        return client
    except (BotoCoreError, ValueError) as error:
        raise RefusedError(
            f"S3 can't be set up ({_set_up_reason(error)}): check the AWS_* variables"
        ) from None


def _build_config() -> Config:
    return Config(
        retries={"mode": "standard", "total_max_attempts": MAX_TRIES},
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        max_pool_connections=MAX_CONNECTIONS,
    )


def _add_md5(request: Any, **_: Any) -> None:
    """Older servers ask for this header where botocore sends another checksum."""
    request.headers["Content-MD5"] = to_md5(request.data)


def to_md5(data: bytes) -> str:
    """What Content-MD5 says of `data`."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _set_up_reason(error: Exception) -> str:
    return "the endpoint is no URL" if isinstance(error, ValueError) else type(error).__name__
