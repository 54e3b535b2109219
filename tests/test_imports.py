"""Which file imports which: no circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"


def imports(folder: Path) -> dict[str, set[str]]:
    """Module → the modules of the folder that it imports anywhere: inside functions and under
    ``TYPE_CHECKING`` as well."""
    files = {_name(path, folder): path for path in folder.rglob("*.py")}
    return {name: set(_imported(name, path, files)) - {name} for name, path in files.items()}


def _name(path: Path, folder: Path) -> str:
    name = ".".join(path.relative_to(folder).with_suffix("").parts)
    return name.removesuffix(".__init__")


def _imported(name: str, path: Path, files: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level]
            start = [*parents, node.module or ""] if node.level else [node.module or ""]
            module = ".".join(start).rstrip(".")
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield from (m for m in (inner if inner in files else module,) if m in files)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that reach each other, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert circles(imports(SRC)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import p.a",
        "from p.a import x",
        "from p import a",
        "from . import a",
        "from .a import x",
        "def f():\n    from p.a import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.a",
    ],
)
def test_circles_are_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").touch()
    (tmp_path / "p" / "a.py").write_text("from p import b")
    (tmp_path / "p" / "b.py").write_text(text)
    assert circles(imports(tmp_path)) == [["p.a", "p.b"]]
