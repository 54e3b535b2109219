"""Why this backend, and why not each other, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fastlinear.dispatch.select import Choice


@dataclass(frozen=True)
class Kept:
    """What one way of training keeps between forward and backward, besides the parameters.

    Attributes:
        way: its name.
        what: which tensors, in words.
        bytes: theirs.
        taken: whether the call takes it.
    """

    way: str
    what: str
    bytes: int
    taken: bool

    def __str__(self) -> str:
        return f"{self.way}: {self.bytes} bytes ({mib(self.bytes)}), {self.what}"


@dataclass(frozen=True)
class Explanation:
    """The choices behind one call, one entry a piece; of a training call of ``gated_mlp`` also what
    each way keeps for the backward. ``str()`` of it is a readable account."""

    choices: tuple[Choice, ...]
    kept: tuple[Kept, ...] = ()

    def to_json(self) -> list[dict[str, Any]]:
        """A JSON-ready list, one dict a piece; ``"kept"`` is with the backward."""
        told: list[dict[str, Any]] = [
            {
                "problem": c.problem.to_json(),
                "backend": c.backend.name,
                "source": c.source,
                "reason": c.reason,
                "passed_over": dict(c.passed_over),
            }
            for c in self.choices
        ]
        for c, one in zip(self.choices, told, strict=True):
            if self.kept and c.problem.piece == "backward":
                one["kept"] = [asdict(k) for k in self.kept]
        return told

    def __str__(self) -> str:
        lines = []
        for c in self.choices:
            lines.append(c.problem.describe())
            lines.append(f"  -> {c.backend.name} ({c.source}): {c.reason}")
            lines.extend(f"     not {name}: {why}" for name, why in c.passed_over)
        if self.kept:
            lines.append("kept between forward and backward, besides the parameters")
            lines.extend(f"  {'->' if k.taken else '  '} {k}" for k in self.kept)
        return "\n".join(lines)


def mib(size: float) -> str:
    """Bytes in MiB, with three significant digits: 12.3 MiB."""
    found = size / (1 << 20)
    return f"{found:.0f} MiB" if found >= 100 else f"{found:.3g} MiB"
