"""Experiments ``ragged`` and ``unequal``: cases, contenders, and that all compute the same."""

from __future__ import annotations

import dataclasses
import shutil
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.contenders import lists
from benchmarks.contenders import ragged_linear as ragged
from benchmarks.contenders import unequal_linear as unequal
from benchmarks.experiments import ragged as ragged_cases
from benchmarks.experiments import unequal as unequal_cases
from benchmarks.harness import measure as measure_module
from benchmarks.harness.case import Case
from benchmarks.harness.kinds import KINDS
from benchmarks.harness.measure import run_case
from benchmarks.harness.settings import Settings
from fastlinear.core.cost import Ceilings
from fastlinear.dispatch.backend import family

SETTINGS = Settings(torch.device("cpu"), rounds=5, budget_s=0.1)
CPU = torch.device("cpu")
GPU_ONLY = {"fastlinear[triton]", "fastlinear[together]"}


@pytest.fixture(autouse=True)
def _quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "ceilings_for", lambda *_: Ceilings(1e15, 1e15))


def rows_by_group(
    direction: str, sizes: str = "skewed", activation: str = "relu", bias: str = "yes"
) -> Case:
    (first, *_) = ragged_cases.cases("cpu", quick=True)
    return dataclasses.replace(
        first,
        dims=(("M", 11), ("G", 5), ("K", 8), ("N", 16)),
        light=False,
        direction=direction,
        options=(("sizes", sizes), ("activation", activation), ("bias", bias)),
    )


def towers(direction: str, sizes: str = "any 3-20", bias: str = "yes") -> Case:
    (first, *_) = unequal_cases.cases("cpu", quick=True)
    return dataclasses.replace(
        first,
        dims=(("M", 6), ("G", 5)),
        direction=direction,
        options=(("sizes", sizes), ("activation", "relu"), ("bias", bias)),
    )


def check(case: Case, expected: set[str]) -> None:
    wanted = [p for p in KINDS[case.family].peers(case) if not p.name.startswith("compile")]
    rows = run_case(case, SETTINGS, wanted)
    skipped = {r["contender"]: r["skipped"] for r in rows if r["skipped"]}
    assert set(skipped) <= GPU_ONLY, skipped
    for row in rows:
        if not row["skipped"]:
            assert row["valid"], (row["contender"], row["verdicts"])
            assert row["median_us"] > 0
    assert {r["contender"] for r in rows} - set(skipped) >= expected
    ours = next(r for r in rows if r["contender"] == "fastlinear")
    (chosen,) = ours["chosen"].values()
    assert chosen in {b.name for b in family(case.family).candidates("forward")}
    assert not ours["best_peer"].startswith("fastlinear")


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("sizes", ["balanced", "skewed", "sparse"])
def test_every_contender_of_ragged_is_right(sizes: str, direction: str) -> None:
    for activation, bias in (("relu", "yes"), ("none", "no")):
        names = {"eager", "eager_parts", "padded_bmm", "grouped_mm", "fastlinear[loop]"}
        check(rows_by_group(direction, sizes, activation, bias), names)


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("sizes", ["8-32", "any 3-20"])
def test_every_contender_of_unequal_is_right(sizes: str, direction: str) -> None:
    for bias in ("yes", "no"):
        names = {"eager", "block_diagonal", "padded_bmm", "fastlinear[loop]"}
        check(towers(direction, sizes, bias), names)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("case", [rows_by_group("forward"), towers("forward")], ids=str)
def test_compiled_contenders_are_right(case: Case) -> None:
    case = dataclasses.replace(case, dtype="bfloat16")
    wanted = [p for p in KINDS[case.family].peers(case) if p.name.startswith("compile")]
    rows = run_case(case, SETTINGS, wanted)
    assert len(rows) == len(wanted)
    assert all(r["valid"] for r in rows), [r["skipped"] for r in rows]


@pytest.mark.parametrize(
    ("module", "case", "lay"),
    [
        (ragged, rows_by_group("forward+backward"), ragged._experts),
        (unequal, towers("forward+backward"), unequal._listed),
    ],
    ids=["ragged", "unequal"],
)
@pytest.mark.parametrize("kind", [0, 1, 2, 3])
def test_a_contender_wrong_in_one_group_is_found(
    module: Any, case: Case, lay: Any, kind: int
) -> None:
    """Its output, or the gradient of x, of a weight or of a bias."""

    def gathered(work: Any, results: Any) -> Any:
        place = module._one_output if module is ragged else module._by_group
        found = list(place(work, results))
        found[kind] = found[kind].clone()
        found[kind][-3:] *= 1.1
        return tuple(found)

    right = next(p for p in module.peers(case) if p.name == "eager")
    wrong = lists.contender("wrong", lay, module._loop, gathered)
    rows = run_case(case, SETTINGS, [right, wrong])
    assert {r["contender"]: r["valid"] for r in rows} == {"eager": True, "wrong": False}


@pytest.mark.parametrize(
    ("module", "case"), [(ragged, rows_by_group("forward")), (unequal, towers("forward"))], ids=str
)
def test_costs_are_each_tensor_of_a_group_with_rows_once(module: ModuleType, case: Case) -> None:
    for direction, passes, products in (("forward", 1, 1), ("forward+backward", 2, 3)):
        work = module.make_work(dataclasses.replace(case, direction=direction), CPU)
        given = work.stacks[0]
        sizes = [(len(x), *w.shape) for x, w in zip(given.xs, given.weights, strict=True)]
        numbers = sum(m * (n + k) + n * k + n for m, n, k in sizes if m)
        assert work.cost().bytes == passes * 4 * numbers
        assert work.cost().flops == products * 2 * sum(m * n * k for m, n, k in sizes)


def test_sizes_of_ragged() -> None:
    for rows, groups in ((512, 8), (4096, 64), (11, 5), (3, 8)):
        found = {}
        for how in ("balanced", "skewed", "sparse"):
            case = rows_by_group("forward", how)
            case = dataclasses.replace(case, dims=(("M", rows), ("G", groups)))
            found[how] = ragged.sizes_of(case)
            assert sum(found[how]) == rows
            assert min(found[how]) >= 0
        assert max(found["balanced"]) - min(found["balanced"]) <= 1
        assert sum(size > 0 for size in found["sparse"]) <= max(1, groups // 4)
        assert max(found["skewed"]) >= 2 * rows // groups


def test_sizes_of_unequal() -> None:
    even = unequal.sizes_of(towers("forward", "16-512"))
    assert even == unequal.sizes_of(towers("forward+backward", "16-512"))
    assert all(size % 8 == 0 and 16 <= size <= 512 for pair in even for size in pair)
    odd = [size for pair in unequal.sizes_of(towers("forward", "any 3-20")) for size in pair]
    assert any(size % 8 for size in odd)
    assert all(3 <= size <= 20 for size in odd)


@pytest.mark.parametrize("cases", [ragged_cases.cases, unequal_cases.cases])
def test_cases_have_names_of_their_own(cases: Any) -> None:
    for device in ("cpu", "cuda"):
        found = cases(device)
        assert len({c.name for c in found}) == len(found)
        assert {c.direction for c in found} == {"forward", "forward+backward"}
    assert {c.dtype for c in cases("cuda")} == {"bfloat16", "float32"}
