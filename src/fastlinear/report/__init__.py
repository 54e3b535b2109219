"""Plain JSON data in, one self-contained HTML page out: no script, no network."""

from fastlinear.report.page import page

__all__ = ["page"]
