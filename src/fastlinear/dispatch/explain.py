"""Why this backend, and why not each other, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastlinear.dispatch.select import Choice


@dataclass(frozen=True)
class Explanation:
    """The choices behind one call, one entry a piece. ``str()`` of it is a readable account."""

    choices: tuple[Choice, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """A JSON-ready list, one dict a piece."""
        return [
            {
                "problem": c.problem.to_json(),
                "backend": c.backend.name,
                "source": c.source,
                "reason": c.reason,
                "passed_over": dict(c.passed_over),
            }
            for c in self.choices
        ]

    def __str__(self) -> str:
        lines = []
        for c in self.choices:
            lines.append(c.problem.describe())
            lines.append(f"  -> {c.backend.name} ({c.source}): {c.reason}")
            lines.extend(f"     not {name}: {why}" for name, why in c.passed_over)
        return "\n".join(lines)
