"""Configurations of whole_cuda's kernels are chosen by a model of their time."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.experiments.configurations import mlp_whole
from benchmarks.experiments.configurations.rows import mean, read, regrets
from fastlinear.families.mlp import gpu_work
from fastlinear.families.mlp.cuda import backend, choice
from fastlinear.families.mlp.problem import problem

ROWS = Path(__file__).parents[3] / "results/nvidia-h200/mlp-whole.jsonl.gz"
CHAINS = [(64,) * 9, (512,) * 9, (1024,) * 9, (4096,) * 5, (784, 256, 10), (7, 13, 5), (2048,) * 2]


@pytest.mark.parametrize("numbers", ["16 bits", "float32"])
def test_the_model_of_time_chooses_what_was_fastest(numbers: str) -> None:
    """Of the configurations that were timed for each of some drawn chains."""
    timed = read(mlp_whole.KIND, ROWS)[numbers]
    told = np.array([mlp_whole.KIND.microseconds(r.problem, r.config) for r in timed])
    us = np.array([row.us for row in timed])
    assert len(timed) > 1000
    assert np.median(np.abs(np.log(told / us))) < 0.07
    assert mean(regrets(timed, told)) < 1.04
    assert mean(regrets(timed, -np.arange(len(timed)))) > 1.2


@pytest.mark.parametrize("widths", CHAINS, ids=str)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_least_time_comes_first(widths: tuple[int, ...], itemsize: int) -> None:
    aligned = not any(k * itemsize % 16 for k in widths[:-1])
    for rows in (1, 16, 64, 100, 1000):
        able = choice.sharings(widths, rows, itemsize, aligned)
        told = [choice.microseconds(s, widths, rows, itemsize) for s in able]
        assert told == sorted(told)
        assert len({choice.kernel(s) for s in able}) == len(able)
        assert not aligned or "launches" in map(choice.kernel, able), "serves any aligned chain"


def test_what_no_kernel_serves() -> None:
    assert choice.sharings((8191, 64), 8, 2, False) == ()
    assert choice.sharings((64, 0, 64), 8, 2, True) == ()
    assert choice.sharings((64, 64), 0, 2, True) == ()
    assert choice.sharings((8,) * (backend.MAX_LAYERS + 2), 8, 2, True) == ()


def test_a_choice_takes_milliseconds_once() -> None:
    choice.sharings.cache_clear()
    spent = []
    for widths in CHAINS:
        for rows in (16, 64, 1000):
            begin = time.thread_time()
            choice.sharings(widths, rows, 2, widths[0] % 8 == 0)
            spent.append(time.thread_time() - begin)
    assert sorted(spent)[len(spent) // 2] < 0.005
    begin = time.thread_time()
    for widths in CHAINS:
        choice.sharings(widths, 64, 2, widths[0] % 8 == 0)
    assert time.thread_time() - begin < 0.001


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_its_work_can_be_priced(dtype: torch.dtype) -> None:
    """The work grows with the layers and the rows."""

    def longest(rows: int, widths: tuple[int, ...]) -> float:
        kind = {"dtype": str(dtype)[6:], "device": "cuda"}
        works = gpu_work.work(problem("forward", rows, widths, **kind), "whole_cuda")
        assert works is not None
        return max(w.units for w in works)

    assert longest(16, (512,) * 3) < longest(16, (512,) * 9) < longest(1000, (512,) * 9)
