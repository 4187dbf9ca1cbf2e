"""What doctor finds, check by check, with machines that are made up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.cluster.servers import RedisServer
from gristmill.jobs.store.database import SCHEMA_REVISION
from gristmill.worker.tools.doctor.check import Check
from gristmill.worker.tools.doctor.model import check_model
from gristmill.worker.tools.doctor.run import (
    LIBRARIES,
    check_cpu,
    check_disk,
    check_libraries,
    check_memory,
    check_python,
    check_torch,
    load_available_memory_bytes,
    load_cpu_flags,
    load_package_version,
    load_state_folder,
    run_checks,
    to_checks_payload,
    to_checks_text,
)
from gristmill.worker.tools.doctor.services import (
    check_broker,
    check_database,
    check_object_store,
    check_services,
)

AVX2_FLAGS = "avx2 fma f16c bmi1 bmi2 abm movbe"


def versions(**found: str) -> Callable[[str], str | None]:
    return found.get


def test_this_machine_passes(tmp_path: Path) -> None:
    checks = run_checks("null:", f"sqlite:///{tmp_path}/jobs.db")
    assert [check for check in checks if check.state == "fail"] == []
    names = ["gristmill", "python", "torch", "libraries", "cpu", "memory", "disk", "database", "model"]
    assert [check.name for check in checks] == names


def test_every_finding_that_is_not_ok_has_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    findings = [
        check_python((3, 10, 4)),
        check_torch(versions()),
        check_libraries(versions()),
        check_cpu(frozenset({"sse2"})),
        check_cpu(frozenset({"avx2"})),
        check_memory(None),
        check_memory(100 << 20),
        check_database(f"sqlite:///{tmp_path}/file/jobs.db"),
        check_broker("redis://user:hush@127.0.0.1:1/0"),
        check_broker("amqp://localhost"),
        check_object_store("s3://"),
        check_model(str(tmp_path / "missing.gguf")),
        check_model(str(tmp_path)),
    ]
    for check in findings:
        assert check.state in ("warn", "fail") and check.detail and check.remedy, check
        assert "hush" not in check.detail + check.remedy
    assert {check.state for check in findings[3:7]} == {"warn"}
    assert (findings[-1].state, str(tmp_path) in findings[-1].detail) == ("fail", True)


@pytest.mark.parametrize(
    ("found", "state"),
    [(new, "ok") for new in ("2.11.0", "2.13.0+cpu", "3.0.0a0+git1234", "2.12")]
    + [(old, "fail") for old in ("2.10.1", "2.9", "1.13.1", "2.9.1+cpu")],
)
def test_an_old_torch_fails_with_the_version_that_is_needed(found: str, state: str) -> None:
    check = check_torch(versions(torch=found))
    assert (check.state, "2.11" in check.remedy) == (state, state == "fail")


def test_missing_libraries_are_named() -> None:
    check = check_libraries(versions(**{name: "1.0" for name in LIBRARIES if name != "pyarrow"}))
    assert (check.state, check.detail, check.remedy) == ("fail", "missing: pyarrow", "pip install pyarrow")
    assert load_package_version("no-such-package-here") is None


def test_flags_and_memory_are_read_as_linux_tells_them_and_unknown_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "proc"
    assert (load_cpu_flags(path), load_available_memory_bytes(path)) == (frozenset(), None)
    path.write_text(f"processor : 0\nflags\t\t: fpu {AVX2_FLAGS}\nbugs\t: none\n")
    detail = check_cpu(load_cpu_flags(path)).detail
    assert detail.startswith("avx2, ") and "; dtype auto means " in detail
    path.write_text("MemTotal: 9 kB\nMemFree: 2 kB\nMemAvailable:    4194304 kB\n")
    assert load_available_memory_bytes(path) == 4 << 30
    assert check_memory(4 << 30).detail == "4.0 GiB available"


def test_the_cpu_line_says_whether_the_kernels_are_built_or_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = frozenset(AVX2_FLAGS.split())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "true")
    check = check_cpu(flags)
    assert check.state == "ok" and "built on first use by" in check.detail
    monkeypatch.setenv("CXX", "no-such-compiler-here")
    check = check_cpu(flags)
    assert check.state == "warn" and "install g++" in check.remedy
    monkeypatch.setattr("gristmill.kernels.cpu.library.is_built", lambda level: True)
    assert check_cpu(flags).state == "ok"


def test_disk_is_measured_where_the_state_folder_will_be(tmp_path: Path) -> None:
    check = check_disk(tmp_path / "not" / "there" / "yet")
    assert str(tmp_path) in check.detail
    assert not (tmp_path / "not").exists()


def test_the_text_puts_each_remedy_under_its_finding() -> None:
    text = to_checks_text([Check("disk", "ok", "lots", "unused"), Check("torch", "fail", "old", "new one")])
    assert text.splitlines() == [
        "ok    disk             lots",
        "fail  torch            old",
        f"{'':<21}-> new one",
    ]


@pytest.mark.parametrize(
    ("states", "worst"), [(["ok"], "ok"), (["ok", "warn"], "warn"), (["warn", "fail", "ok"], "fail")]
)
def test_the_payload_tells_the_worst_state(states: list[str], worst: str) -> None:
    payload = to_checks_payload([Check("name", state, "detail") for state in states])
    assert payload["state"] == worst
    assert [check["state"] for check in payload["checks"]] == states


def test_doctor_imports_no_torch(repo_root: Path, smollm2_path: str) -> None:
    code = (
        "import sys, gristmill.worker.tools.doctor.run as d; checks = d.run_checks(sys.argv[1], None); "
        "sys.exit(checks[-1].size is None or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, smollm2_path]
    assert subprocess.run(command, cwd=repo_root, check=False).returncode == 0


def test_the_state_folder_is_that_of_the_sqlite_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_state_folder(f"sqlite:///{tmp_path}/deep/jobs.db") == tmp_path / "deep"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert load_state_folder(None) == tmp_path / "gristmill"
    for url in ("no url", "postgresql://host/jobs"):
        assert load_state_folder(url) == Path.home()


def test_a_database_that_answers_is_named_without_its_password(tmp_path: Path) -> None:
    assert "hush" not in check_database(f"sqlite:///{tmp_path}/jobs.db?password=hush").detail


def test_the_broker_and_s3_are_looked_at_only_where_they_are_configured(
    redis_url: str, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_services() == []
    monkeypatch.setenv("GRISTMILL_BROKER_URL", redis_url)
    monkeypatch.setenv("GRISTMILL_ALLOW_URIS", f"/data, {s3_root}/in,{s3_root}/out")
    checks = check_services()
    assert [check.name for check in checks] == ["broker", "object store", "object store"]
    assert {check.state for check in checks} == {"ok"} and "Redis 6." in checks[0].detail
    assert f"{s3_root}/out at http://127.0.0.1" in checks[2].detail


def test_a_broker_that_may_drop_messages_is_a_warning(redis_url: str, redis_server: RedisServer) -> None:
    with redis_server.client(0) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", 1 << 30)
        try:
            check = check_broker(redis_url)
        finally:
            client.config_set("maxmemory", 0)
            client.config_set("maxmemory-policy", "noeviction")
    assert (check.state, "allkeys-lru" in check.detail) == ("warn", True)
    assert check_broker(redis_url).state == "ok"


@pytest.mark.long
def test_a_bucket_that_is_not_there_is_a_warning_and_a_dead_endpoint_a_failure(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = check_object_store("s3://no-such-bucket-here/out")
    assert (check.state, "no-such-bucket-here" in check.detail) == ("warn", True)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr("gristmill.jobs.storage.s3.client.MAX_TRIES", 1)
    assert check_object_store("s3://bucket/out").state == "fail"


def test_a_postgresql_database_is_named_with_its_schema(postgres_url: str) -> None:
    check = check_database(postgres_url)
    assert check.state == "ok" and check.detail.startswith("PostgreSQL, postgresql://")
    assert check.detail.endswith(f"schema {SCHEMA_REVISION}")
