"""The pictures of docs/architecture.md name files that are there, and that a call passes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fastlinear"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
_PATH = re.compile(r"(?<![\w./<-])((?:[\w-]+/)+[\w.-]*|[\w-]+\.(?:py|md|toml))(?![\w>/])")
_TRACED = """
import sys, torch, fastlinear as fl
x, w, b = torch.randn(8, 32), torch.randn(32, 32), torch.randn(32)
fl.linear_act  # loads the family
files = set()
def watch(frame, event, _):
    if event == "call":
        files.add(frame.f_code.co_filename)
sys.setprofile(watch)
fl.linear_act(x, w, b, activation="relu")
sys.setprofile(None)
print(*files, sep="\\n")
"""


def paths(text: str) -> set[str]:
    """Paths of files and folders in code spans, pictures and links."""
    spans = re.findall(r"```text\n(.*?)```|`([^`\n]+)`|\]\(([^)#]+)", text, re.S)
    return {p for span in spans for part in span for p in _PATH.findall(part)}


def test_every_path_exists() -> None:
    found = paths(TEXT)
    assert len(found) > 60
    places = (PACKAGE, ROOT, ROOT / "docs")
    family = PACKAGE / "families" / "diagonal"  # the example of how to add one
    assert sorted(p for p in found if not any((at / p).exists() for at in (*places, family))) == []


def test_a_first_call_passes_every_file_of_its_picture() -> None:
    picture = TEXT.partition("<!-- call:begin -->")[2].partition("<!-- call:end -->")[0]
    named = {PACKAGE / p for p in paths(picture)}
    assert len(named) > 12
    command = [sys.executable, "-c", _TRACED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    passed = {Path(line).resolve() for line in done.stdout.splitlines()}
    assert sorted(str(p) for p in named if p.resolve() not in passed) == []


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 120
