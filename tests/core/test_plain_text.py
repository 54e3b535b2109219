"""Names of others never reach a terminal or a page as they are."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastlinear as fl
from fastlinear import cli
from fastlinear.cli import console
from fastlinear.core import text_table
from fastlinear.core.errors import InputError
from fastlinear.core.plain_text import one_line, plain, plain_data

EVIL = "<img src=x onerror=alert(1)>\x1b[31mRED\x1b]0;title\x07\u202e\x9b2J\r\u2028{{7*7}}'\"&"


def unsafe(text: str) -> set[str]:
    """Characters that a terminal acts on, or that hide or turn others."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}


def test_every_such_character_is_written_out() -> None:
    for code in range(0x110000):
        c = chr(code)
        if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in "\u200b\u200f\u202e\u2066":
            assert unsafe(one_line(c)) == set(), hex(code)
    assert plain("µs → 3×\n\té") == "µs → 3×\n\té"
    assert one_line("a\nb\tc") == "a\\nb\\tc"
    assert plain_data({EVIL: [EVIL, (EVIL,), 1, None]}) == {
        plain(EVIL): [plain(EVIL), (plain(EVIL),), 1, None]
    }


class Act(nn.ReLU):
    pass


Act.__name__ = Act.__qualname__ = EVIL


@pytest.fixture(scope="module")
def result() -> Any:
    model = nn.Sequential()
    for i in range(2):
        model.add_module(f"{i}{EVIL.replace('.', '')}", nn.Linear(8, 8))
        model.add_module(f"act{i}{EVIL}", Act())
    return fl.optimize_(model, torch.ones(2, 8), config=fl.Config(time_budget_s=0.1, draws=1))


@pytest.mark.parametrize("width", [60, 160])
def test_tables(result: Any, width: int) -> None:
    assert unsafe(result.table(width=width)) == set()
    assert unsafe(result.profile.table(width=width)) == set()
    drawn = text_table.table(("name", EVIL), [(EVIL, "a\nb")], width=width)
    assert unsafe(text_table.as_text([drawn, EVIL], width)) == set()


def test_pages(result: Any, tmp_path: Path) -> None:
    for what in (result, result.profile):
        html = what.html(tmp_path / "page.html").read_text(encoding="utf-8")
        assert unsafe(html) == set()
        assert "<img" not in html
        assert "<script" not in html
        assert "49" not in re.findall(r"RED.{0,60}", html)[0]
        assert "default-src 'none'" in html


def test_errors() -> None:
    assert unsafe(str(InputError(EVIL, EVIL, EVIL, EVIL))) == set()


def test_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    console.say(EVIL)
    console.show_error(EVIL)
    console.note(EVIL)
    console.table(EVIL, (EVIL,), [(EVIL,)])
    with console.progress_bar() as progress:
        progress(EVIL, 0, 1)
    console.print_json({EVIL: EVIL})
    out, err = capsys.readouterr()
    assert unsafe(out) == set()
    assert unsafe(err) == set()
    assert out.count("RED") == 6
    assert err.count("RED") == 3


def test_nothing_of_the_command_line_prints_by_itself() -> None:
    for path in Path(cli.__file__).parent.glob("*.py"):
        if path.name != "console.py":
            found = re.findall(
                r"\bprint\(|typer\.s?echo\((?!f\"fastlinear \{__version__)", path.read_text()
            )
            assert not found, path.name


def test_any_name_is_profiled_and_told() -> None:
    """Class names reach ``str``, and names that are no valid text the profiler."""
    model = nn.Sequential()
    model.add_module("half \ud800", nn.Linear(8, 8))
    model.add_module("act", nn.ReLU())
    outer = type(EVIL, (nn.Sequential,), {})(model)
    x = torch.randn(2, 8)
    result = fl.optimize_(outer.eval(), x, config=fl.Config(time_budget_s=1.0, tune=False))
    assert "half \\ud800" in result.table()
    for text in (str(result), result.table(), fl.profile(outer, x).table()):
        assert plain(text) == text
