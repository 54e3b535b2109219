"""rows.cu and row_grads.cu compile for Hopper on a machine without a GPU, and stay in registers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.experiments.configurations import mlp_rows
from benchmarks.experiments.configurations.rows import mean, read, regrets
from fastlinear.families.mlp import gpu_work, layerwise
from fastlinear.families.mlp.cuda import rows
from fastlinear.families.mlp.cuda.rows import Rows
from fastlinear.families.mlp.problem import problem, x_layout_of
from fastlinear.kernels.cuda.hopper import ARCH
from tests.families import nvrtc_offline as nvrtc

ROOT = Path(__file__).parents[3]
BF16, FP16 = torch.bfloat16, torch.float16
TOWER, POLICY, COORDINATES = (415, 512, 512, 256, 1), (376, 256, 256, 17), (63, *(256,) * 4, 4)
NARROW = (32, 64, 64, 64, 16)


def _frame(config: Rows, widths: tuple[int, ...], dtype: torch.dtype, *rest: object) -> int:
    """Bytes of local memory."""
    text = rows.source(config, widths, dtype, *rest)  # type: ignore[arg-type]
    found = nvrtc.usage(text, "rows.cu", ARCH)[rows.KERNEL]
    assert found.registers <= 65536 // config.threads, "threads share 65536 registers"
    return found.frame


@pytest.mark.parametrize("widths", [TOWER, POLICY, COORDINATES, NARROW], ids=str)
def test_what_is_chosen_keeps_all_but_a_few_words_in_registers(widths: tuple[int, ...]) -> None:
    for backward in (False, True):
        steps = widths[::-1] if backward else widths
        config = rows.rows_for(1 << 16, steps, backward, False, 132)
        assert config is not None
        assert _frame(config, steps, BF16, "relu", "none", backward) <= 24


@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh", "mish"])
def test_activations_stay_in_registers(activation: str) -> None:
    for backward in (False, True):
        steps = NARROW[::-1] if backward else NARROW
        config = rows.rows_for(1 << 16, steps, backward, True, 132)
        assert config is not None
        assert _frame(config, steps, FP16, activation, activation, backward, True) <= 24


def test_the_widest_chain_keeps_all_but_a_few_words_in_registers() -> None:
    config = Rows(2, 2)
    assert _frame(config, TOWER, BF16, "gelu", "none", False, True) == 0
    assert _frame(config, TOWER[::-1], BF16, "gelu", "none", True, True) <= 32


@pytest.mark.parametrize(("consumers", "width"), [(1, 128), (3, 128), (4, 64)])
def test_other_numbers_of_consumers_stay_in_registers(consumers: int, width: int) -> None:
    widths, config = (3, *(width,) * 3, 1), Rows(consumers, 3)
    assert _frame(config, widths, BF16, "gelu", "none", False, True) == 0
    assert _frame(config, widths[::-1], BF16, "gelu", "none", True, True) <= 24


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gradients_of_weights_stay_in_registers(dtype: torch.dtype) -> None:
    found = nvrtc.usage(rows.grads_source(dtype), "row_grads.cu", ARCH)
    assert {found[rows.GRADS_KERNEL].frame, found[rows.SUMS_KERNEL].frame} == {0}
    assert found[rows.GRADS_KERNEL].registers <= 168, "384 threads share 65536 registers"


@pytest.mark.parametrize("widths", [TOWER, POLICY, COORDINATES, NARROW], ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_its_work_can_be_priced(widths: tuple[int, ...], activation: str) -> None:
    """The work grows with the rows, and a backward has that of all dW besides."""
    kinds, longest = [], []
    for piece in ("forward", "backward"):
        for m in (256, 1 << 16):
            p = problem(
                *(piece, m, widths),
                dtype="bfloat16",
                device="cuda",
                activation=activation,
                needs_grad=True,
            )
            works = gpu_work.work(p, "rows_cuda")
            assert works is not None
            kinds.append({w.kind for w in works})
            longest.append(max(w.units for w in works))
    assert longest[0] < longest[1]
    assert longest[2] < longest[3]
    assert any(kind.endswith("grads") for kind in kinds[2])
    assert not any(kind.endswith("grads") for kind in kinds[0])


def test_rows_that_begin_on_16_bytes_are_priced_as_such() -> None:
    """Whatever is in one. The gradient of the first weight reads it without a copy, too."""
    options = {"dtype": "bfloat16", "device": "cuda", "needs_grad": True}
    widths, wide = (79, 128, 128, 4), torch.empty(4096, 80, dtype=BF16)
    told = [x_layout_of(t) for t in (wide[:, :79], wide[:, :72], wide, torch.empty(9, 79))]
    assert told == ["pitched", "rows", "rows", "rows"]
    pitched, dense = (problem("forward", 4096, widths, x_layout=x, **options) for x in told[::3])
    assert [p.option("x") for p in layerwise.layers_of(pitched)] == ["rows"] * 3
    for backend, kind in (("rows_cuda", "forward read"), ("whole_triton", "forward ends")):
        for p, expected in ((pitched, set()), (dense, {"rows:2"})):
            works = gpu_work.work(p, backend)
            assert works is not None
            of_x = [w for w in works if w.kind.endswith(kind) and (w.sizes or {})["n"] == 79]
            assert {v for w in of_x for v in w.variants} == expected
    back = [gpu_work.work(p.with_piece("backward"), "rows_cuda") for p in (pitched, dense)]
    assert back[0] is not None
    assert back[1] is not None
    assert all(w in back[1] for w in back[0])
    assert [w.kind for w in back[1] if w not in back[0]] == ["mlp rows copied"]


@pytest.mark.parametrize("backward", [False, True])
def test_the_model_of_time_chooses_what_was_fastest(backward: bool) -> None:
    """Of the configurations that were timed for each of some drawn chains."""
    kind = mlp_rows.KIND
    rows_ = read(kind, ROOT / "results/nvidia-h200/mlp-rows.jsonl.gz")
    timed = rows_["backward" if backward else "forward"]
    served = [row for row in timed if kind.serves(row.problem, row.config)]
    told = [kind.microseconds(r.problem, r.config) for r in served]
    assert len(served) > 50
    assert mean(regrets(served, np.array(told))) < 1.04
    assert mean(regrets(served, np.ones(len(served)))) > 1.03


def test_a_launch_is_shared_out_by_a_model_of_its_time() -> None:
    """Few rows take small blocks, for more multiprocessors; narrow chains keep their weights."""
    few = rows.rows_for(256, POLICY, False, False, 132)
    many = rows.rows_for(1 << 16, COORDINATES, False, False, 132)
    narrow = rows.rows_for(1 << 18, NARROW, False, False, 132)
    assert few is not None
    assert many is not None
    assert narrow is not None
    assert (few.consumers, many.consumers) == (1, 2)
    assert narrow.resident(NARROW)
    assert rows.rows_for(64, (600, 600), False, False, 132) is None
