"""Measurements hold as long as all files do that a backend runs from."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import fastlinear
from fastlinear.dispatch.backend import Backend, families
from fastlinear.native import cpp_build

PACKAGE = Path(fastlinear.__file__).parent
BACKENDS = {
    f"{b.family}.{b.piece}-{b.name}": b
    for family in families().values()
    for b in family.backends
    if b.name != "eager"
}
FOLDERS = ("cpu", "cuda", "triton")


def computes(file: Path) -> bool:
    """Whether a file is in a folder of kernels: of a family's, or those that families share."""
    within = file.relative_to(PACKAGE).parts
    return within[0] in ("families", "kernels") and within[-2] in FOLDERS


def needed(file: Path) -> Iterator[Path]:
    """The files of kernels that a file includes or imports."""
    if file.suffix == ".cpp":
        yield from (path.resolve() for path in cpp_build.sources(file))
    if file.suffix != ".py":
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastlinear."):
            names = (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
            for name in names:
                spec = find_spec(name) if name == node.module or _is_module(name) else None
                if spec is not None and spec.origin is not None:
                    path = Path(spec.origin)
                    if path.name != "__init__.py" and computes(path):
                        yield path


def _is_module(name: str) -> bool:
    return (PACKAGE.parent / Path(*name.split("."))).with_suffix(".py").exists()


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_sources_cover_what_a_backend_runs_from(backend: Backend) -> None:
    files = set(backend.source_files())
    missing = {
        path.relative_to(PACKAGE).as_posix()
        for file in files
        if computes(file) or file.suffix == ".cpp"
        for path in needed(file)
        if path not in files
    }
    assert missing == set()
