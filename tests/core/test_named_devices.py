"""No tensor of the library's own depends on the default device."""

from __future__ import annotations

import ast
from pathlib import Path

import fastlinear as fl

_MAKERS = {
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "eye", "rand", "randn", "randint"),
    *("randperm", "arange", "linspace", "logspace", "empty_strided", "scalar_tensor", "Generator"),
}
_SOURCES = Path(fl.__file__).parent


def test_whatever_makes_a_tensor_names_its_device() -> None:
    """Under ``torch.set_default_device`` it would lie elsewhere than what it is used with."""
    unnamed = [
        f"{path.relative_to(_SOURCES)}:{node.lineno}"
        for path in _SOURCES.rglob("*.py")
        if "bench" not in path.relative_to(_SOURCES).parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in _MAKERS
        and not any(k.arg in ("device", None) for k in node.keywords)
        and not (node.func.attr == "Generator" and node.args)
    ]
    assert unnamed == []
