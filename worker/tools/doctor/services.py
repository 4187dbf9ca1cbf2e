"""What doctor finds at the services of the queue: the job database, the broker and S3.

The broker and S3 are looked at only where they are configured: a job on one machine needs neither.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import redis
from sqlalchemy import make_url

from gristmill.jobs.broker import broker_url, has_broker
from gristmill.jobs.errors import JobsError, RefusedError, Unavailable
from gristmill.jobs.storage.s3.check import check_s3
from gristmill.jobs.store.database import SCHEMA_REVISION, database_url, safe_url
from gristmill.jobs.store.store import open_store
from gristmill.worker.tools.doctor.check import Check

_TIMEOUT_S = 3.0
_S3_REMEDY = "check AWS_ENDPOINT_URL, the credentials and the bucket; a place for inputs may stay read-only"


def check_services(broker: str | None = None, allow: Sequence[str] | None = None) -> list[Check]:
    """The broker, and each s3:// place that workers may write to; what is not configured gives no check."""
    checks = [check_broker(broker)] if has_broker(broker) else []
    return checks + [check_object_store(root) for root in load_s3_roots(allow)]


def check_database(url: str | None) -> Check:
    """Opening a store brings an SQLite file up to head and refuses a schema that is newer than this code."""
    try:
        with open_store(database_url(url)) as store:
            store.jobs.newest(1)
    except JobsError as error:
        return Check(
            "database", "fail", str(error), "set --database-url or GRISTMILL_DATABASE_URL to one that answers"
        )
    kind = "SQLite" if make_url(database_url(url)).get_backend_name() == "sqlite" else "PostgreSQL"
    return Check("database", "ok", f"{kind}, {safe_url(database_url(url))}, schema {SCHEMA_REVISION}")


def check_broker(url: str | None) -> Check:
    """Whether Redis answers, and keeps what it is given."""
    remedy = "start Redis, or set GRISTMILL_BROKER_URL to one that answers, like redis://localhost:6379/0"
    try:
        place = broker_url(url)
        with redis.Redis.from_url(
            place, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
        ) as client:
            facts = client.info()
    except RefusedError as error:
        return Check("broker", "fail", str(error), remedy)
    except (redis.RedisError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return Check("broker", "fail", f"{safe_url(place)} does not answer: {reason}", remedy)
    policy = facts.get("maxmemory_policy", "noeviction")
    detail = f"Redis {facts.get('redis_version')}, {safe_url(place)}"
    if facts.get("maxmemory") and policy != "noeviction":
        return Check(
            "broker",
            "warn",
            f"{detail}, drops messages when it is full ({policy})",
            "set maxmemory-policy noeviction: submissions by Celery would be lost",
        )
    return Check("broker", "ok", detail)


def check_object_store(root: str) -> Check:
    """Writes, copies, reads and deletes a small object below `root`, as jobs do."""
    try:
        check_s3(root)
    except Unavailable as error:
        return Check("object store", "fail", str(error), _S3_REMEDY)
    except JobsError as error:  # a place for inputs alone may be read-only
        return Check("object store", "warn", f"no job can write there: {error}", _S3_REMEDY)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return Check(
        "object store", "ok", f"{root} at {safe_url(endpoint) if endpoint else 'the endpoint of AWS'}"
    )


def load_s3_roots(allow: Sequence[str] | None) -> list[str]:
    """The places in S3 among `allow`, else among GRISTMILL_ALLOW_URIS."""
    given = allow if allow is not None else os.environ.get("GRISTMILL_ALLOW_URIS", "").split(",")
    return [place.strip() for place in given if place.strip().startswith("s3://")]
