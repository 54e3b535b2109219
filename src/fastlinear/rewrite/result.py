"""What optimize_ and apply_ hand back: an outcome for every linear, and the way back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fastlinear.core.text_table import PIPE_WIDTH, as_text
from fastlinear.profile.table import not_followed
from fastlinear.rewrite.outcome import Outcome
from fastlinear.rewrite.swap.modules import SwapSet
from fastlinear.rewrite.table import render

_MOST_KINDS = 8  # of weights not followed that a table shows


@dataclass(frozen=True, eq=False)
class Result(Outcome):
    """The outcome of ``optimize_`` or ``apply_`` on one model: its data, and the way back.

    The attributes are those of ``Outcome``.
    """

    _swaps: SwapSet = field(repr=False, kw_only=True)

    def revert(self) -> None:
        """Put the model back exactly as it was. A second call does nothing.

        Raises InputError when somebody else has replaced a rewritten forward since.
        """
        self._swaps.revert()

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON, to be given to ``fl.apply_``; returns the path."""
        return self.plan.save(path)

    def html(self, path: str | Path) -> Path:
        """Write the report as one self-contained page; returns the path. Folders are made."""
        from fastlinear.report import page

        path = Path(path).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(self.to_json()), encoding="utf-8")
        return path

    def table(self, *, width: int = PIPE_WIDTH) -> str:
        """Every site with its outcome, the step before and after, what findings advise that no
        rewrite does, and the weights not followed, as plain text of at most ``width`` columns."""
        left = not_followed(self.not_followed, _MOST_KINDS, width)
        return render(self, width) + (as_text(left, width) if left else "")
