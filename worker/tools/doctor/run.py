"""`gristmill doctor`: looks at this machine and installation and says what would go wrong, and the remedy.

Changes nothing, but that the job database is brought up to head as by every command, and that a small
object is written below each s3:// place in GRISTMILL_ALLOW_URIS and deleted again.
Never imports torch: versions come from the packages' metadata.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from gristmill.engine.checkpoint.opening import resolve_dtype
from gristmill.engine.cpu_state import load_cpu_state
from gristmill.jobs.store.database import database_url
from gristmill.worker.tools.doctor.check import Check
from gristmill.worker.tools.doctor.model import check_model, to_size_lines, to_size_payload
from gristmill.worker.tools.doctor.services import check_database, check_services
from gristmill.worker.version import load_version

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
MIN_MEMORY_BYTES = 2 << 30
MIN_DISK_BYTES = 1 << 30
LIBRARIES = (
    *("tokenizers", "numpy", "jinja2", "msgpack", "pyarrow", "pydantic", "sqlalchemy", "alembic"),
    *("psycopg", "celery", "redis", "boto3", "safetensors", "py3langid"),
)


def run_checks(model: str | None, url: str | None, broker: str | None = None) -> list[Check]:
    """Every check in the order in which a person should read them; `broker` as for gristmill.jobs.broker.broker_url."""
    checks = [
        Check("gristmill", "ok", load_version()),
        check_python(sys.version_info[:3]),
        check_torch(load_package_version),
        check_libraries(load_package_version),
        check_cpu(load_cpu_flags()),
        check_memory(load_available_memory_bytes()),
        check_disk(load_state_folder(url)),
        check_database(url),
        *check_services(broker),
    ]
    return [*checks, check_model(model)] if model is not None else checks


def check_python(python: tuple[int, ...]) -> Check:
    """Whether this Python is new enough."""
    text = ".".join(map(str, python))
    if python < MIN_PYTHON:
        return Check("python", "fail", text, f"install Python {'.'.join(map(str, MIN_PYTHON))} or newer")
    return Check("python", "ok", f"{text} on {platform.machine()}")


def check_torch(load_version: Callable[[str], str | None]) -> Check:
    """Whether PyTorch is there and new enough; nothing is imported."""
    found, wanted = load_version("torch"), ".".join(map(str, MIN_TORCH))
    remedy = f"pip install 'torch>={wanted}'"
    if found is None:
        return Check("torch", "fail", "not installed", remedy)
    release = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if release < MIN_TORCH:
        return Check("torch", "fail", f"{found} is older than {wanted}", remedy)
    return Check("torch", "ok", found)


def check_libraries(load_version: Callable[[str], str | None]) -> Check:
    """Whether every library that is needed is installed."""
    found = {name: load_version(name) for name in LIBRARIES}
    if missing := [name for name, text in found.items() if text is None]:
        remedy = f"pip install {' '.join(missing)}"
        return Check("libraries", "fail", f"missing: {', '.join(missing)}", remedy)
    return Check("libraries", "ok", ", ".join(f"{name} {text}" for name, text in found.items()))


def check_cpu(flags: frozenset[str]) -> Check:
    """Which C++ kernels this CPU can run, and whether they are built or can be."""
    dtype = f"dtype auto means {resolve_dtype('auto')}"
    if "avx2" not in flags:
        remedy = "expect slow matrix products: run on an x86-64 CPU with AVX2 or better"
        return Check("cpu", "warn", f"no AVX2, so no C++ kernels; {dtype}", remedy)
    state = load_cpu_state(flags)
    if state.level == "none":
        return Check("cpu", "warn", f"AVX2 without FMA, so no C++ kernels; {dtype}", "run on a newer CPU")
    if state.is_built:
        return Check("cpu", "ok", f"{state.level}, its C++ kernels are built; {dtype}")
    if state.compiler is None:
        detail = (
            f"{state.level}, but there is no C++ compiler for its kernels, torch's own are slower; {dtype}"
        )
        return Check("cpu", "warn", detail, state.remedy)
    detail = f"{state.level}, its C++ kernels are built on first use by {state.compiler}; {dtype}"
    return Check("cpu", "ok", detail)


def check_memory(available_bytes: int | None) -> Check:
    """Whether enough memory is free for a small model."""
    if available_bytes is None:
        remedy = "check by hand that the model fits"
        return Check("memory", "warn", "unknown: /proc/meminfo can't be read", remedy)
    remedy = f"free {to_size_text(MIN_MEMORY_BYTES)} or choose a model that is smaller than that"
    state = "warn" if available_bytes < MIN_MEMORY_BYTES else "ok"
    return Check(
        "memory", state, f"{to_size_text(available_bytes)} available", remedy if state != "ok" else ""
    )


def check_disk(folder: Path) -> Check:
    """Free space where the state is kept: measured at the nearest folder that exists."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    free_bytes = shutil.disk_usage(existing).free
    detail = f"{to_size_text(free_bytes)} free in {existing}"
    if free_bytes < MIN_DISK_BYTES:
        remedy = f"free {to_size_text(MIN_DISK_BYTES)}, or set XDG_STATE_HOME elsewhere"
        return Check("disk", "warn", detail, remedy)
    return Check("disk", "ok", detail)


def load_state_folder(url: str | None) -> Path:
    """The folder of the SQLite file; the user's home where the database is none or the URL can't be read."""
    try:
        parsed = make_url(database_url(url))
    except ArgumentError:
        return Path.home()
    is_file = parsed.get_backend_name() == "sqlite" and parsed.database
    return Path(str(parsed.database)).absolute().parent if is_file else Path.home()


def load_package_version(name: str) -> str | None:
    """The version of an installed package; None without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def load_fact(path: Path, name: str) -> list[str]:
    """The words behind a name in a file of Linux's /proc; none where there is no such line or file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return next((line.partition(":")[2].split() for line in lines if line.startswith(name)), [])


def load_cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The CPU's flags, as Linux tells them; none elsewhere."""
    return frozenset(load_fact(path, "flags"))


def load_available_memory_bytes(path: Path = Path("/proc/meminfo")) -> int | None:
    """The memory that is free, as Linux tells it; None elsewhere."""
    words = load_fact(path, "MemAvailable:")
    return int(words[0]) * 1024 if words else None


def to_size_text(size_bytes: int) -> str:
    """A size in GiB."""
    return f"{size_bytes / (1 << 30):,.1f} GiB"


def to_checks_text(checks: Iterable[Check]) -> str:
    """One line a check, its remedy or a model's sizes under it."""
    lines = []
    for check in checks:
        lines.append(f"{check.state:<4}  {check.name:<15}  {check.detail}")
        if check.remedy and check.state != "ok":
            lines.append(f"{'':<21}-> {check.remedy}")
        if check.size is not None:
            lines += [f"{'':<23}{line}" for line in to_size_lines(check.size)]
    return "\n".join(lines)


def to_checks_payload(checks: Sequence[Check]) -> dict[str, Any]:
    """Plain values; only a model that has weights has a `size`."""
    states = {check.state for check in checks}
    listed = [
        {name: value for name, value in asdict(check).items() if name != "size"}
        | ({"size": to_size_payload(check.size)} if check.size is not None else {})
        for check in checks
    ]
    return {"state": next((s for s in ("fail", "warn") if s in states), "ok"), "checks": listed}
