"""compose.yaml and the Dockerfile without Docker: the same commands and variables as local processes.

Servers from wheels stand in for the images, so host names and ports are replaced, and nothing else.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.cluster.servers import PostgresServer, RedisServer, S3Server
from tests.conftest import start_or_skip
from tests.integration.cluster import Cluster
from tests.integration.worker_process import COMMAND

ROOT = Path(__file__).resolve().parent.parent
URLS = ("GRISTMILL_DATABASE_URL", "GRISTMILL_BROKER_URL", "AWS_ENDPOINT_URL")
MODEL = "smollm2-135m-instruct"


def load_services() -> dict[str, Any]:
    """The services as compose reads them on a machine where no variable is set."""
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    services = yaml.safe_load(text)["services"]
    assert isinstance(services, dict)
    return services


class ComposedRedis(RedisServer):
    """Redis with the flags of compose.yaml."""

    def command(self) -> list[str]:
        [program, *_], given = super().command(), load_services()["redis"]["command"][1:]
        return [program, *given, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]


class ComposedS3(S3Server):
    """SeaweedFS with the flags and keys of compose.yaml; its ports and folder are ours."""

    def command(self) -> list[str]:
        service = load_services()["s3"]
        self.variables = dict(service["environment"])
        program, _, *flags = super().command()
        own = [flag for flag in flags if re.match(r"-(ip|dir|\w+\.(port|localSocket))\b", flag)]
        return [program, *service["command"], *own]


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Cluster]:
    """The three services, up; the cluster's environment is that of the service `worker`."""
    with ExitStack() as stack:
        redis = start_or_skip(stack, ComposedRedis)
        postgres = start_or_skip(stack, PostgresServer)
        s3 = start_or_skip(stack, ComposedS3)
        account = load_services()["postgres"]["environment"]
        user, database = account["POSTGRES_USER"], account["POSTGRES_DB"]
        postgres.execute(f"CREATE ROLE {user} LOGIN PASSWORD '{account['POSTGRES_PASSWORD']}'")
        postgres.execute(f"CREATE DATABASE {database} OWNER {user}")
        environment = dict(load_services()["worker"]["environment"])
        places = {"postgres:5432": postgres.port, "redis:6379": redis.port, "s3:8333": s3.port}
        for name in URLS:
            for place, port in places.items():
                environment[name] = environment[name].replace(f"@{place}", f"@127.0.0.1:{port}")
                environment[name] = environment[name].replace(f"//{place}", f"//127.0.0.1:{port}")
        cluster = Cluster(
            tmp_path,
            database_url=environment["GRISTMILL_DATABASE_URL"],
            broker_url=environment["GRISTMILL_BROKER_URL"],
            root=environment["GRISTMILL_ALLOW_URIS"],
            s3=s3,
        )
        cluster.environment = environment | {"OMP_NUM_THREADS": "1"}
        stack.callback(cluster.close)
        yield cluster


@pytest.mark.long
def test_the_composed_worker_runs_a_job_from_s3_to_s3(composed: Cluster, smollm2_path: str) -> None:
    services = load_services()
    migrated = composed.run(*services["migrate"]["command"])
    assert migrated.returncode == 0, migrated.stderr
    [name, *arguments] = services["worker"]["command"]
    assert name == "worker"
    arguments = [str(Path(smollm2_path).parent) if word == "/models" else word for word in arguments]
    worker = composed.start_worker({}, allow=[], args=arguments)
    assert check_health(composed, services["worker"]["healthcheck"]["test"]) == 0

    expected = composed.write_rows("in/rows.jsonl", 3)
    submit = ["submit", "s3://gristmill/in/", "--output", "s3://gristmill/out", "--model", MODEL]
    done = composed.run(*submit, "--prompt", "Say hello to {{ text }}", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.split()[-1]
    composed.wait_done(job_id)
    composed.assert_whole(job_id, expected)

    assert worker.stop() == 0
    assert check_health(composed, services["worker"]["healthcheck"]["test"]) != 0


def check_health(composed: Cluster, test: list[str]) -> int:
    """Runs the health check as the container's shell does; its exit code."""
    kind, script = test
    assert kind == "CMD-SHELL"
    command = " ".join(shlex.quote(word) for word in COMMAND)
    script = f'gristmill() {{ {command} "$@"; }}\n' + script.replace("$$", "$")
    env = {**os.environ, **composed.environment, "HOSTNAME": socket.gethostname()}
    return subprocess.run(["sh", "-c", script], cwd=ROOT, env=env, timeout=60).returncode


def test_every_service_is_watched_and_none_runs_as_root() -> None:
    services = load_services()
    assert set(services) == {"redis", "postgres", "s3", "migrate", "worker"}
    for name, service in services.items():
        assert service["healthcheck"].get("test") or name == "migrate"
        is_ours = service["image"].startswith("gristmill:")
        assert is_ours or ":" in service["image"], f"{name} has no version"
        assert is_ours or name == "s3" or service["user"] not in ("root", "0")
        if is_ours:
            assert service["environment"] == services["worker"]["environment"]
            assert service["cap_drop"] == ["ALL"]


def test_the_environment_is_enough_for_a_worker() -> None:
    environment = load_services()["worker"]["environment"]
    assert all(environment[name] for name in (*URLS, "GRISTMILL_ALLOW_URIS", "AWS_ACCESS_KEY_ID"))
    bucket = environment["GRISTMILL_ALLOW_URIS"].removeprefix("s3://")
    assert f"-bucket={bucket}" in load_services()["s3"]["command"]


def test_a_data_volume_outlives_its_container() -> None:
    declared = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["volumes"]
    mounts = [mount for service in load_services().values() for mount in service.get("volumes", [])]
    named = {mount.split(":")[0] for mount in mounts if not mount.startswith(("/", "."))}
    assert named == set(declared)


def test_the_image_holds_every_package_and_does_not_run_as_root() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {
        word
        for line in lines
        if line.startswith("COPY") and "--from" not in line
        for word in line.split()[1:-1]
    }
    linked = {link.name for link in (ROOT / "gristmill").iterdir() if link.is_symlink()}
    assert linked | {"gristmill"} <= copied
    assert all((ROOT / word).exists() for word in copied)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {word.removeprefix("!") for word in ignored if word.startswith("!")} == copied
    assert [line for line in lines if line.startswith("USER")] == ["USER gristmill"]
    assert 'ENTRYPOINT ["gristmill"]' in lines
    assert f"ARG PYTHON={sys.version_info.major}." in "\n".join(lines)
