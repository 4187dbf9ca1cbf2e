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
    a_file = tmp_path / "file"
    a_file.touch()
    findings = [
        check_python((3, 10, 4)),
        check_torch(versions()),
        check_torch(versions(torch="2.9.1+cpu")),
        check_libraries(versions()),
        check_cpu(frozenset()),
        check_memory(None),
        check_memory(100 << 20),
        check_database(f"sqlite:///{a_file}/jobs.db"),
        check_broker("redis://127.0.0.1:1/0"),
        check_broker("amqp://localhost"),
        check_object_store("s3://"),
        check_model(str(tmp_path / "missing.gguf")),
    ]
    for check in findings:
        assert check.state in ("warn", "fail"), check
        assert check.detail, check
        assert check.remedy, check


@pytest.mark.parametrize("found", ["2.11.0", "2.13.0+cpu", "3.0.0a0+git1234", "2.12"])
def test_a_new_torch_is_ok(found: str) -> None:
    assert check_torch(versions(torch=found)).state == "ok"


@pytest.mark.parametrize("found", ["2.10.1", "2.9", "1.13.1"])
def test_an_old_torch_fails_with_the_version_that_is_needed(found: str) -> None:
    check = check_torch(versions(torch=found))
    assert check.state == "fail"
    assert "2.11" in check.remedy


def test_missing_libraries_are_named() -> None:
    check = check_libraries(versions(**{name: "1.0" for name in LIBRARIES if name != "pyarrow"}))
    assert (check.state, check.detail, check.remedy) == ("fail", "missing: pyarrow", "pip install pyarrow")


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert load_package_version("no-such-package-here") is None


def test_cpu_features_come_from_the_flags_line(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags\t\t: fpu {AVX2_FLAGS}\nbugs\t: none\n")
    check = check_cpu(load_cpu_flags(cpuinfo))
    assert check.detail.startswith("avx2, ")
    assert "; dtype auto means " in check.detail


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


def test_a_cpu_without_the_kernels_instructions_is_a_warning() -> None:
    assert check_cpu(frozenset({"sse2"})).state == "warn"
    assert check_cpu(frozenset({"avx2"})).state == "warn"


def test_a_machine_without_proc_is_not_an_error(tmp_path: Path) -> None:
    assert load_cpu_flags(tmp_path / "none") == frozenset()
    assert load_available_memory_bytes(tmp_path / "none") is None


def test_available_memory_is_read_in_bytes(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemFree: 2 kB\nMemAvailable:    4194304 kB\n")
    available_bytes = load_available_memory_bytes(meminfo)
    assert available_bytes == 4 << 30
    assert check_memory(available_bytes).detail == "4.0 GiB available"


def test_disk_is_measured_where_the_state_folder_will_be(tmp_path: Path) -> None:
    check = check_disk(tmp_path / "not" / "there" / "yet")
    assert str(tmp_path) in check.detail
    assert not (tmp_path / "not").exists()


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    check = check_model(str(tmp_path))
    assert check.state == "fail"
    assert str(tmp_path) in check.detail


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
    check = check_database(f"sqlite:///{tmp_path}/jobs.db?password=hush")
    assert "hush" not in check.detail


def test_the_broker_and_s3_are_looked_at_only_where_they_are_configured(
    redis_url: str, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_services() == []
    monkeypatch.setenv("GRISTMILL_BROKER_URL", redis_url)
    monkeypatch.setenv("GRISTMILL_ALLOW_URIS", f"/data, {s3_root}/in,{s3_root}/out")
    checks = check_services()
    assert [(check.name, check.state) for check in checks] == [
        ("broker", "ok"),
        ("object store", "ok"),
        ("object store", "ok"),
    ]
    assert "Redis 6." in checks[0].detail
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
    assert check.state == "warn"
    assert "allkeys-lru" in check.detail
    assert check_broker(redis_url).state == "ok"


def test_no_password_of_a_broker_is_shown() -> None:
    check = check_broker("redis://user:hush@127.0.0.1:1/0")
    assert check.state == "fail"
    assert "hush" not in check.detail + check.remedy


@pytest.mark.long
def test_a_bucket_that_is_not_there_is_a_warning_and_a_dead_endpoint_a_failure(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = check_object_store("s3://no-such-bucket-here/out")
    assert check.state == "warn"
    assert "no-such-bucket-here" in check.detail
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr("gristmill.jobs.storage.s3.client.MAX_TRIES", 1)
    assert check_object_store("s3://bucket/out").state == "fail"


def test_a_postgresql_database_is_named_with_its_schema(postgres_url: str) -> None:
    check = check_database(postgres_url)
    assert check.state == "ok"
    assert check.detail.startswith("PostgreSQL, postgresql://")
    assert check.detail.endswith(f"schema {SCHEMA_REVISION}")
