"""What ``profile`` returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastlinear.core.text_table import PIPE_WIDTH
from fastlinear.profile.records import ProfileData
from fastlinear.profile.table import render


@dataclass(frozen=True)
class ProfileReport(ProfileData):
    """The outcome of ``profile``: its data, as a table, as JSON and as a page.

    The attributes are those of ``ProfileData``.
    """

    def table(self, rows: int = 20, *, width: int = PIPE_WIDTH) -> str:
        """What is unattributed, the ``rows`` slowest modules and findings, as plain text of at most
        ``width`` columns."""
        return render(self, rows, width)

    def html(self, path: str | Path) -> Path:
        """Write the report as one self-contained page; returns the path."""
        from fastlinear.report import page

        path = Path(path).expanduser()
        path.write_text(page(self.to_json()), encoding="utf-8")
        return path
