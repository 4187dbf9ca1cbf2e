"""Holds the arrows between folders, and the house rules that a parser can check.

kernels <- engine <- worker -> jobs; jobs imports nothing of ours. Inside a package a folder imports only what
FOLDERS allows. Imports are read from the syntax tree, so also those inside functions count for the arrows; only
module-level ones count for torch and for circles.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 300
MAX_FILES = 20
OURS = ("kernels", "engine", "jobs", "worker", "migrations")
PACKAGES = {
    "kernels": {"kernels"},
    "engine": {"engine", "kernels"},
    "jobs": {"jobs"},
    "worker": {"worker", "engine", "jobs"},
    "migrations": {"jobs"},
    "gristmill": {"gristmill", "engine", "jobs", "worker"},
}
# The arrows inside a package: from a folder (with those inside it) to the folders beside it. A package's loose
# files are values and import no folder, except those that stand here by name.
FOLDERS = {
    "kernels/torch": set(),
    "kernels/cpu": {"torch"},
    "kernels/dispatch.py": {"cpu", "torch"},
    "engine/checkpoint": set(),
    "engine/text": {"checkpoint"},
    "engine/batch": {"text"},
    "engine/model": {"checkpoint", "text", "batch"},
    "engine/quantize": {"checkpoint", "text", "model"},
    "engine/null_engine.py": {"text"},
    "engine/engine.py": {"text", "batch", "model"},
    "engine/build.py": {
        *("checkpoint", "text", "batch", "model", "quantize"),
        *("engine.py", "null_engine.py"),
    },
    "engine/model/random_weights.py": {"checkpoint", "text", "batch", "model", "build.py", "engine.py"},
    "engine/measure": {"model", "engine.py"},
    "engine/process": {"build.py", "engine.py", "null_engine.py"},
    "jobs/storage": set(),
    "jobs/input": {"storage"},
    "jobs/prompt": set(),
    "jobs/store": set(),
    "jobs/regroup": {"storage", "input", "prompt"},
    "jobs/output": {"storage", "store", "regroup"},
    "jobs/plan": {"storage", "input", "prompt", "store", "regroup", "output"},
    "jobs/broker.py": {"store"},
    "jobs/client.py": {"store", "output", "broker.py"},
    "worker/engine": set(),
    "worker/show": set(),
    "worker/run": {"engine", "show"},
    "worker/local": {"engine", "show", "run", "serve"},
    "worker/serve": {"engine", "show", "run"},
    "worker/tools": {"show", "run"},
    "worker/cli": {"show", "local", "serve", "tools"},
}
TORCH_FAMILY = {"torch", "triton", "transformers", "accelerate"}
TESTS_ONLY = {"transformers", "accelerate", "gguf", "pytest", "hypothesis", "duckdb", "pandas"}
# The folders and files that may import torch when they are imported.
TORCH = (
    *(
        "kernels/",
        "engine/model/",
        "engine/quantize/",
        "engine/measure/",
        "engine/build.py",
        "engine/engine.py",
    ),
    *("engine/checkpoint/gguf_codes.py", "engine/checkpoint/weights.py", "engine/checkpoint/formats/"),
)


def list_product_files() -> list[str]:
    """The .py files of the packages and of gristmill/, whose links to the packages are not followed."""
    found = [path for package in (*OURS, "gristmill") for path in walk_python(ROOT / package)]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def walk_python(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place) / name for name in names if name.endswith(".py"))


FILES = list_product_files()


@functools.cache
def load_tree(relative: str) -> ast.Module:
    return ast.parse((ROOT / relative).read_text(encoding="utf-8"), filename=relative)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import: also those inside if, try, with and class bodies."""
    for node in body:
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if is_type_checking(node):
            assert isinstance(node, ast.If)
            yield from module_level(node.orelse)
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from module_level(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from module_level(handler.body)


def imported_names(nodes: Iterator[ast.AST] | list[ast.stmt]) -> set[str]:
    """The dotted names that import statements among the nodes ask for."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; the house style is absolute"
            assert node.module is not None
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def to_file(name: str) -> str | None:
    """The product file of the dotted name `gristmill.x.y`; None for a name inside a module or of a folder."""
    relative = name.removeprefix("gristmill.").replace(".", "/") + ".py"
    return relative if name.startswith("gristmill.") and relative in FILES else None


def imported_files(relative: str, at_import: bool = False) -> set[str]:
    """The product files that a product file imports; at_import: only what is imported when it is."""
    tree = load_tree(relative)
    names = imported_names(module_level(tree.body) if at_import else ast.walk(tree))
    return {file for name in names if (file := to_file(name)) is not None and file != relative}


def top_levels(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def test_there_is_something_to_check() -> None:
    assert {path.split("/")[0] for path in FILES} == {*OURS, "gristmill"}
    assert len(FILES) > 150 and sum(len(imported_files(path)) for path in FILES) > 500


def test_a_package_imports_only_what_it_may() -> None:
    guilty = []
    for relative in FILES:
        allowed = set() if "/versions/" in relative else PACKAGES[relative.split("/")[0]]
        found = {path.split("/")[0] for path in imported_files(relative)}
        guilty += [f"{relative} imports {name}" for name in sorted(found - allowed)]
    assert not guilty


def to_folder(relative: str) -> str:
    """Where FOLDERS has the file: itself, else its folder right below the package, else the package."""
    parts = relative.split("/")
    return relative if relative in FOLDERS else "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def test_a_folder_imports_only_the_folders_it_may() -> None:
    guilty = []
    for relative in FILES:
        folder, package = to_folder(relative), relative.split("/")[0]
        if package in ("migrations", "gristmill"):
            continue
        allowed = {folder, package, *(f"{package}/{name}" for name in FOLDERS.get(folder, ()))}
        found = {to_folder(file) for file in imported_files(relative) if file.startswith(f"{package}/")}
        guilty += [f"{relative} imports {name}" for name in sorted(found - allowed)]
    assert not guilty


def test_the_allowed_arrows_run_in_no_circle() -> None:
    arrows = {folder: {f"{folder.split('/')[0]}/{name}" for name in FOLDERS[folder]} for folder in FOLDERS}
    assert set(TopologicalSorter(arrows).static_order()) == FOLDERS.keys()


def test_nothing_is_imported_by_its_folder_name_alone() -> None:
    guilty = []
    for relative in FILES:
        names = top_levels(imported_names(ast.walk(load_tree(relative)))) & set(OURS)
        guilty += [f"{relative} imports {name}: write gristmill.{name}" for name in sorted(names)]
    assert not guilty


def test_the_examples_import_nothing_of_the_tests() -> None:
    for path in walk_python(ROOT / "examples"):
        assert "tests" not in top_levels(imported_names(list(ast.walk(ast.parse(path.read_text()))))), path


def test_no_import_runs_in_a_circle() -> None:
    seen: dict[str, bool] = {}  # False while it is on the path that is walked

    def walk(relative: str, path: tuple[str, ...]) -> None:
        if relative in seen:
            assert seen[relative], " -> ".join((*path[path.index(relative) :], relative))
            return
        seen[relative] = False
        for each in sorted(imported_files(relative)):
            walk(each, (*path, relative))
        seen[relative] = True

    for relative in FILES:
        walk(relative, ())


def test_the_engine_knows_the_contract_of_the_kernels_and_none_of_the_devices() -> None:
    known = {f"kernels/{name}.py" for name in ("contract", "dispatch", "linear", "quantized", "reference")}
    guilty = []
    for relative in FILES:
        if relative.startswith("engine/"):
            found = {path for path in imported_files(relative) if path.startswith("kernels/")}
            guilty += [f"{relative} imports {path}" for path in sorted(found - known)]
    assert not guilty


def test_only_what_may_imports_torch() -> None:
    guilty = []
    for relative in FILES:
        if not relative.startswith(TORCH):
            used = top_levels(imported_names(module_level(load_tree(relative).body))) & TORCH_FAMILY
            guilty += [f"{relative} imports {name}: `gristmill status` would wait for it" for name in used]
    assert not guilty


def test_the_engine_needs_none_of_the_libraries_that_only_tests_may_use() -> None:
    guilty = []
    for relative in FILES:
        used = top_levels(imported_names(ast.walk(load_tree(relative)))) & TESTS_ONLY
        guilty += [f"{relative} imports {name}" for name in sorted(used)]
    assert not guilty


def test_an_init_file_is_a_docstring_and_nothing_else() -> None:
    trees = {path: load_tree(path) for path in FILES if path.endswith("__init__.py")}
    trees.pop("gristmill/__init__.py")
    assert not [path for path, tree in trees.items() if len(tree.body) != 1 or not ast.get_docstring(tree)]


def test_a_product_file_keeps_to_the_line_limit() -> None:
    sizes = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in FILES}
    guilty = {path: size for path, size in sizes.items() if size > MAX_LINES}
    assert not guilty, f"over {MAX_LINES} lines, make them simpler: {guilty}"


def test_a_subject_of_the_store_has_few_methods_and_no_parents() -> None:
    trees = [load_tree(path) for path in FILES if path.startswith("jobs/store/")]
    for subject in (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)):
        names = [node.name for node in subject.body if isinstance(node, ast.FunctionDef)]
        assert len([name for name in names if not name.startswith("_")]) <= 12, subject.name
        assert {ast.unparse(base) for base in subject.bases} <= {"NamedTuple", "Protocol"}, subject.name


def test_a_folder_is_a_subject_and_holds_few_files() -> None:
    folders: dict[str, int] = {}
    for path in FILES:
        folders[os.path.dirname(path)] = folders.get(os.path.dirname(path), 0) + 1
    assert not {folder: count for folder, count in folders.items() if count > MAX_FILES}


def test_a_module_opens_with_a_docstring() -> None:
    assert not [path for path in FILES if not ast.get_docstring(load_tree(path))]


def test_every_folder_is_a_package_and_so_in_the_wheel() -> None:
    folders = {os.path.dirname(path) for path in FILES}
    assert not [folder for folder in folders if f"{folder}/__init__.py" not in FILES]
    assert all((ROOT / "gristmill" / package).samefile(ROOT / package) for package in OURS)


def test_the_repo_never_reads_the_workplace_folder_beside_it() -> None:
    needle = "../" + "shared"
    files = [path for name in (*OURS, "tests", "examples") for path in (ROOT / name).rglob("*")]
    files += [ROOT / name for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run")]
    texts = (
        path for path in files if path.suffix in {"", ".py", ".toml", ".txt", ".md", ".sh", ".ini", ".mako"}
    )
    guilty = [path for path in texts if path.is_file() and needle.encode() in path.read_bytes()]
    assert not guilty, f"{[str(path.relative_to(ROOT)) for path in guilty]} mention {needle}"


def test_the_command_starts_without_torch() -> None:
    code = (
        "import sys, gristmill.worker.cli.main, gristmill.worker.engine.client, gristmill.engine.null_engine\n"
        "import gristmill.engine.text.tokenizer, gristmill.engine.process.serve\n"
        "heavy = {'torch', 'transformers', 'triton'} & set(sys.modules)\n"
        "sys.exit(f'imported at start: {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
