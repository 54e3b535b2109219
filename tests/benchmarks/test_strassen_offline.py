"""The Strassen chain's kernels compile for each architecture, on a machine without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from benchmarks.experiments.strassen import gpu as backend
from benchmarks.experiments.strassen.scheme import Scheme
from tests.families.triton_offline import Recorded, recorder, usage


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorded]]:
    """Launches made while the test runs; none is carried out."""
    made: list[Recorded] = []
    monkeypatch.setattr(backend, "Launch", recorder(made))
    monkeypatch.setattr(torch, "bmm", lambda a, b, out: out)
    backend._launches.clear()
    yield made
    backend._launches.clear()
    backend.forget_weights()


def pose(m: int, width: int, dtype: torch.dtype, scheme: Scheme, act: str, save: bool) -> None:
    """A chain of two layers on meta tensors."""
    x = torch.empty(m, width, dtype=dtype, device="meta")
    weights = tuple(torch.empty(width, width, dtype=dtype, device="meta") for _ in range(2))
    biases = tuple(torch.empty(width, dtype=dtype, device="meta") for _ in range(2))
    backend.run(x, weights, biases, (act, act), save, scheme)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("levels", [1, 2])
def test_no_spills_and_wide_accesses(levels: int, arch: int, launches: list[Recorded]) -> None:
    pose(4096, 2048, torch.float32, Scheme("strassen", levels), "relu", False)
    # prefix, weight, chain, weight, suffix
    assert len(launches) == 5
    planes = 7**levels
    for launch, stores in zip(launches[:3], (planes, planes, planes), strict=True):
        compiled = launch.compile(arch)
        assert usage(compiled).stack == 0
        wide = re.findall(r"st\.global\.v[24]\.b32", compiled.asm["ptx"])
        assert len(wide) == stores, launch.kernel
    assert usage(launches[4].compile(arch)).stack == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["strassen", "classical"])
def test_training_and_odd_sizes(name: str, dtype: torch.dtype, launches: list[Recorded]) -> None:
    pose(1001, 777, dtype, Scheme(name, 1), "gelu", True)
    for launch in (launches[0], launches[1], launches[2], launches[4]):
        assert usage(launch.compile(90)).stack == 0


def test_launches_are_remembered(launches: list[Recorded]) -> None:
    for _ in range(2):
        pose(64, 64, torch.float32, Scheme("strassen", 1), "relu", False)
    assert len(launches) == 10
    assert len(backend._launches) == 4  # prefix, weight, chain, suffix
