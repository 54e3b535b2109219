"""Models of several processes: refused before anything runs, and without a hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlinear as fl

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch without gloo",
)
_LIMIT_S = 240
_NAMES = {
    "DDP": "DistributedDataParallel",
    "replicate": "torch.distributed._composable.replicate",
    "FSDP1": "FSDP1",
    "FSDP2": "FSDP2",
    "tensor parallel": "torch.distributed.tensor",
    "all_reduce": "c10d.allreduce_",
}


@pytest.fixture(scope="module")
def told() -> Any:
    """What two processes saw; they are ended with the time limit."""
    here = Path(__file__).parent / "two_processes.py"
    folder = str(Path(fl.__file__).parents[1])
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"),
            *("--standalone", "--local_addr=127.0.0.1", str(here)),
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("{") :])


@pytest.mark.parametrize("name", _NAMES)
def test_refused_by_name_and_left_as_it_was(name: str, told: Any) -> None:
    found = told["refusals"][name]
    for entry, text in found["texts"].items():
        assert text.startswith("UnsupportedError"), (entry, text)
        assert _NAMES[name] in text, (entry, text)
        assert "fl.apply_(model, path) on every process" in text, (entry, text)
    assert found["same"]


@pytest.mark.parametrize("name", ["DDP", "FSDP2"])
def test_a_model_optimized_first_and_wrapped_afterwards_trains(name: str, told: Any) -> None:
    assert told["wrapped_afterwards"][name]["kept"] > 0
    assert told["wrapped_afterwards"][name]["off"] < 1e-5


@pytest.mark.parametrize("name", ["tensor parallel", "FSDP2"])
def test_torchs_functions_shard_the_layers_of_an_mlp(name: str, told: Any) -> None:
    assert told["mlp_layers"][name] < 1e-5
