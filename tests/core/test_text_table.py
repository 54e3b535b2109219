"""Tables fit their width; names stay whole as long as words can give way."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fastlinear.core.text_table import as_text, table

COLUMNS = ("module", ">µs", "why")
ROWS = [
    ("encoder.layer.0.intermediate", 12.5, "nothing to do: it is as fast as it gets"),
    ("head", 1000.0, "kept"),
]


def lines(width: int) -> list[str]:
    return as_text([table(COLUMNS, ROWS, width=width)], width).splitlines()


@pytest.mark.parametrize("width", [30, 44, 60, 160])
def test_no_line_is_longer_than_the_width_and_nothing_is_lost(width: int) -> None:
    shown = lines(width)
    assert max(map(len, shown)) <= width
    assert sorted("".join("".join(shown[2:]).split())) == sorted(
        "".join(str(cell) for row in ROWS for cell in row).replace(" ", "")
    )


def test_names_and_numbers_stay_whole_where_words_can_wrap() -> None:
    shown = "\n".join(lines(50))
    assert "encoder.layer.0.intermediate" in shown
    assert "nothing to do: it is as fast" not in shown


def test_numbers_stand_on_the_right() -> None:
    end = lines(160)[0].index("µs") + 2
    assert [line[:end][-6:] for line in lines(160)[2:]] == ["  12.5", "1000.0"]


def test_brackets_are_text() -> None:
    assert "[1.10, 3.27]" in as_text(["1.24x [1.10, 3.27] [bold]"], 80)
    assert "[red]" in as_text([table(("a",), [("[red]",)], width=80)], 80)


def test_no_rows_and_no_colours() -> None:
    assert as_text([table(COLUMNS, [], width=80)], 80).splitlines()[0].split() == [
        "module",
        "µs",
        "why",
    ]
    assert "\x1b" not in as_text([table(COLUMNS, ROWS, width=80)], 80)


def test_rich_is_not_loaded_before_a_table_is_drawn() -> None:
    code = "import sys, fastlinear.core.text_table; print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
