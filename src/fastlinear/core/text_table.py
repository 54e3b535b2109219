"""Tables for terminals and pipes, all drawn alike. rich is loaded when one is drawn, not before."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastlinear.core.plain_text import one_line, plain

if TYPE_CHECKING:
    from rich.table import Table

PIPE_WIDTH = 160
"""Columns of a table where no terminal says how many there are."""

_GAP = 2  # spaces between two columns
_LEAST = 8  # a name that must be broken is not made narrower than this


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, width: int) -> Table:
    """A rich table of at most ``width`` columns.

    Columns whose name starts with ``>`` are right-aligned. Cells of several words wrap; names and
    numbers stay whole as long as the words leave them room.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    names = [one_line(name.removeprefix(">")) for name in columns]
    drawn = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, _GAP - 1, 0, 0),
    )
    whole = _whole(names, cells, width)
    for i, name in enumerate(names):
        right = columns[i].startswith(">")
        drawn.add_column(
            name, justify="right" if right else "left", overflow="fold", no_wrap=i in whole
        )
    for row in cells:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn


def as_text(parts: Sequence[Any], width: int) -> str:
    """Tables and lines as plain text, without colours, what a terminal would act on, and spaces at
    the ends of lines."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False, markup=False)
    for part in parts:
        console.print(plain(part) if isinstance(part, str) else part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _whole(names: list[str], cells: list[list[str]], width: int) -> set[int]:
    """The columns whose cells are single words and can stay whole; the widest give way first."""
    least = []
    single = []
    for i, name in enumerate(names):
        column = [name, *(row[i] for row in cells)]
        words = [word for cell in column for word in cell.split()]
        alone = not any(" " in cell for cell in column[1:])
        single.append(alone)
        least.append(max(map(len, column if alone else words), default=0))
    whole = {i for i, alone in enumerate(single) if alone}
    while whole and sum(least) + _GAP * (len(names) - 1) > width:
        widest = max(whole, key=lambda i: least[i])
        whole.discard(widest)
        least[widest] = min(least[widest], _LEAST)
    return whole
