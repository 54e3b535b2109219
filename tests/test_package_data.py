"""What a wheel must hold beside Python files, and what it must not hold."""

from __future__ import annotations

import tomllib
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_PACKAGE = _ROOT / "src" / "fastlinear"


def test_every_file_of_the_package_is_shipped() -> None:
    """A source or table that no pattern of the package data covers would be missing in a wheel."""
    data = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = data["tool"]["setuptools"]["package-data"]["fastlinear"]
    shipped = {path for pattern in patterns for path in _PACKAGE.glob(pattern)}
    files = {p for p in _PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert {p for p in files if p.suffix not in (".py", ".md")} <= shipped
    assert any(p.suffix == ".h" for p in shipped)


def test_no_benchmark_is_shipped() -> None:
    """A wheel is made of the packages below src, among them none of ``benchmarks``."""
    data = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert data["tool"]["setuptools"]["packages"] == {"find": {"where": ["src"]}}
    assert set(data["tool"]["setuptools"]["package-data"]) == {"fastlinear"}
    assert [p.parent for p in (_ROOT / "src").glob("*/__init__.py")] == [_PACKAGE]
    named = [p for p in _PACKAGE.rglob("*.*") if p.name.startswith("bench")]
    assert named == [_PACKAGE / "cli" / "bench.py"]
    assert (_ROOT / "benchmarks" / "__init__.py").is_file()
