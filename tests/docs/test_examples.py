"""Every Python block of the documentation runs, every docstring example holds, every command and
option the documentation names exists, and every relative link leads somewhere."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fastlinear
from fastlinear.cli import app

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "results/*.md", "src/**/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: str, *languages: str) -> list[str]:
    """The fenced blocks of a page in the given languages, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [code for language, code in _FENCE.findall(text) if language in languages]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")])
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one page run one after another and share their names."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "documentation"}
    for i, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{page}, Python block {i + 1}", "exec"), names)


def test_the_readme_has_an_example() -> None:
    assert "fl.optimize_" in "".join(blocks("README.md", "python"))


def commands() -> list[tuple[str, str]]:
    """(page, line) for every ``$ fastlinear …`` in the documentation."""
    found = []
    for page in PAGES:
        for code in blocks(page, "console", "sh", "bash"):
            for line in code.splitlines():
                text = line.removeprefix("$ ").split("#")[0].strip()
                if text.startswith("fastlinear "):
                    found.append((page, text))
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_documented_commands_exist(page: str, line: str) -> None:
    words = shlex.split(line)[1:]
    depth = 2 if words[0] == "cache" or words[:2] == ["bench", "drawn"] else 1
    depth = 3 if words[:3] == ["bench", "models", "--suite"] else depth
    shown = CliRunner().invoke(app, [*words[:depth], "--help"], terminal_width=200)
    assert shown.exit_code == 0, f"{page}: {line}"
    for word in words[depth:]:
        if word.startswith("-"):
            assert word in shown.stdout, f"{page}: {line}: no option {word}"


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page: str) -> None:
    text = _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def modules() -> list[str]:
    """Every module but those that need Triton or a CUDA compiler at import."""
    found = pkgutil.walk_packages(fastlinear.__path__, "fastlinear.")
    skipped = ("triton", "cuda", "__main__")
    return [m.name for m in found if not any(s in m.name.rpartition(".")[2] for s in skipped)]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_docstring_examples_are_found() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in ("fastlinear.families.linear.op", "fastlinear.nn.linear", "fastlinear.report.page"):
        assert any(test.examples for test in finder.find(importlib.import_module(name)))
