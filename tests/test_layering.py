"""Holds the arrows between the packages, and the house rules that a parser can check.

kernels <- engine <- worker -> jobs; jobs imports nothing of ours. The imports are read from the syntax tree,
so also those inside functions count for the arrows; only module-level ones count for torch.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 300
OURS = ("kernels", "engine", "jobs", "worker", "migrations")
ALLOWED = {
    "kernels": {"kernels"},
    "engine": {"engine", "kernels"},
    "jobs": {"jobs"},
    "worker": {"worker", "engine", "jobs"},
    "migrations": {"jobs"},
}
# The modules of engine/ that may import torch when they are imported; all of kernels/ may, nothing else.
TORCH_ENGINE = {
    *(
        "build",
        "engine",
        "kv_scales",
        "model",
        "model_runner",
        "random_weights",
        "roofline",
        "rope",
        "sampler",
    ),
    *("scoring", "weights", "formats/gguf_codes", "formats/packed_words"),
}
TORCH_FAMILY = {"torch", "triton", "transformers", "accelerate"}
TESTS_ONLY = {"transformers", "accelerate", "gguf", "pytest", "hypothesis", "duckdb", "pandas"}
PRODUCT_FILES = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))
MODULES = [str(path.relative_to(ROOT)) for path in PRODUCT_FILES]


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


def top_levels(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def may_import_torch(relative: str) -> bool:
    package, _, name = relative.removesuffix(".py").partition("/")
    return package == "kernels" or (
        package == "engine" and (name in TORCH_ENGINE or name.startswith("quantize/"))
    )


def test_there_is_something_to_check() -> None:
    assert {path.split("/")[0] for path in MODULES} >= {"kernels", "engine", "jobs", "worker"}


def test_a_module_imports_only_what_its_package_may() -> None:
    guilty = []
    for relative in MODULES:
        used = top_levels(imported_names(ast.walk(load_tree(relative)))) & set(OURS)
        allowed = set() if relative.startswith("migrations/versions/") else ALLOWED[relative.split("/")[0]]
        guilty += [f"{relative} imports {name}" for name in sorted(used - allowed)]
    assert not guilty


def test_a_torch_free_module_imports_no_torch_at_module_level() -> None:
    guilty = []
    for relative in (path for path in MODULES if not may_import_torch(path)):
        used = top_levels(imported_names(module_level(load_tree(relative).body))) & TORCH_FAMILY
        guilty += [
            f"{relative} imports {name}: `gristmill status` would wait for it" for name in sorted(used)
        ]
    assert not guilty


def test_the_engine_needs_none_of_the_libraries_that_only_tests_may_use() -> None:
    guilty = []
    for relative in MODULES:
        used = top_levels(imported_names(ast.walk(load_tree(relative)))) & TESTS_ONLY
        guilty += [f"{relative} imports {name}" for name in sorted(used)]
    assert not guilty


def test_an_init_file_is_a_docstring_and_nothing_else() -> None:
    trees = {path: load_tree(path) for path in MODULES if path.endswith("__init__.py")}
    assert not [path for path, tree in trees.items() if len(tree.body) != 1 or not ast.get_docstring(tree)]


def test_a_product_file_keeps_to_the_line_limit() -> None:
    sizes = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in MODULES}
    guilty = {path: size for path, size in sizes.items() if size > MAX_LINES}
    assert not guilty, f"over {MAX_LINES} lines, split by noun: {guilty}"


def test_a_module_opens_with_a_docstring() -> None:
    assert not [path for path in MODULES if not ast.get_docstring(load_tree(path))]


def test_the_repo_never_reads_the_workplace_folder_beside_it() -> None:
    needle = "../" + "shared"
    files = [path for name in (*OURS, "tests", "examples") for path in (ROOT / name).rglob("*")]
    files += [ROOT / name for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run")]
    texts = (
        path for path in files if path.suffix in {"", ".py", ".toml", ".txt", ".md", ".sh", ".ini", ".mako"}
    )
    guilty = [path for path in texts if path.is_file() and needle.encode() in path.read_bytes()]
    assert not guilty, f"{[str(path.relative_to(ROOT)) for path in guilty]} mention {needle}"


def test_every_package_folder_is_listed_for_installation() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    folders = {path.parent for path in PRODUCT_FILES}
    names = {str(folder.relative_to(ROOT)).replace("/", ".") for folder in folders}
    missing = {name for name in names if f'"{name}"' not in pyproject}
    assert not missing, f"[tool.setuptools] packages lacks {sorted(missing)}"


def test_the_command_starts_without_torch() -> None:
    code = (
        "import sys, worker.cli, worker.engine_client, engine.tokenizer, engine.process, engine.null_engine\n"
        "heavy = {'torch', 'transformers', 'triton'} & set(sys.modules)\n"
        "sys.exit(f'imported at start: {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
