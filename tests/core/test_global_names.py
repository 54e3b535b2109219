"""Names of globals, apart from names of attributes."""

from __future__ import annotations

from typing import Any

from fastlinear.core.global_names import global_names

OFFSET = 1


def test_only_globals_are_named() -> None:
    def function(self: Any, x: Any) -> Any:
        local = self.OFFSET + x.shape
        return len(local) + OFFSET + self.fc(OFFSET)

    assert global_names(function.__code__) == ("len", "OFFSET")


def test_code_outside_of_functions_is_read_too() -> None:
    assert global_names(compile("a.b + c", "<text>", "eval")) == ("a", "c")
