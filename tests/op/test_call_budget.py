"""What a public call costs in Python: frames of a warm one, files that a first one passes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.fastpath import autograd_node, lookup

X, W, B = torch.randn(8, 32), torch.randn(32, 32), torch.randn(32)
CALLS: dict[str, Callable[[], Tensor]] = {
    "linear_act": lambda: fl.linear_act(X, W, B, activation="relu"),
    "mlp": lambda: fl.mlp(X, [W, W], [B, B], activation="relu"),
    "gated_mlp": lambda: fl.gated_mlp(X, W, W, W),
    "diagonal_linear": lambda: fl.diagonal_linear(X, B, B, activation="relu"),
    "grouped_linear": lambda: fl.grouped_linear(X, W.view(2, 32, 16)),
}
FILES = {
    "linear_act": 38,
    "mlp": 44,  # looks at its layers' backends as well
    "gated_mlp": 44,
    "diagonal_linear": 39,
    "grouped_linear": 45,
}
"""Most files of fastlinear that the first call of a process passes. Never raise them."""
_FIRST = """
import sys, runpy
CALLS = runpy.run_path({path!r})["CALLS"]
import fastlinear as fl
for name in CALLS:
    getattr(fl, name)  # loads its family, which the call would do otherwise
files = set()
def watch(frame, event, _):
    if event == "call" and "/fastlinear/" in frame.f_code.co_filename:
        files.add(frame.f_code.co_filename)
call = CALLS[{name!r}]
sys.setprofile(watch)
call()
sys.setprofile(None)
print(len(files))
"""


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_is_two_frames_of_ours(name: str) -> None:
    if not (lookup.wait(120) and autograd_node.wait(180)):
        pytest.skip("no compiler here")
    call = CALLS[name]
    for _ in range(4):
        call()
    frames: list[str] = []

    def watch(frame: object, event: str, _: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        if event == "call" and code.co_filename.endswith(("/op.py", "/op/front.py")):
            frames.append(f"{code.co_filename}:{code.co_name}")

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert len(frames) <= 2, frames


@pytest.mark.parametrize("name", CALLS)
def test_a_first_call_passes_few_files(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _FIRST.format(name=name, path=__file__)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(run.stdout.splitlines()[-1]) <= FILES[name]
