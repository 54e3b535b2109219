"""What the one-pass backwards launch, with a stand-in for the driver: which tensors, which sums."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.families.grouped.cuda import one_pass
from fastlinear.families.grouped.reference import Needs
from fastlinear.kernels.cuda import prepared
from fastlinear.native import cuda_driver as driver

G, N, K, M = 3, 40, 24, 7
SLOTS = 5
ALL: Needs = (True, True, True)
RUNS: list[tuple[str, int, list[int | None]]] = []  # kernel, grid, values of its arguments


class Map:
    """A tensor map that is an address."""

    def __init__(self) -> None:
        self.value = 0

    def point_at(self, address: int) -> None:
        self.value = address


class Launch:
    """``driver.Launch`` that writes down what it would launch."""

    def __init__(self, kernel: Any, block: int, cluster: int, arguments: Sequence[Any]) -> None:
        self.kernel, self.arguments = kernel, arguments
        assert (block, cluster) == ((96, 2) if kernel == "pass" else (256, 1))

    def set_grid(self, blocks: int) -> None:
        self.grid = blocks

    def run(self, stream: int) -> None:
        assert stream == 77
        RUNS.append((self.kernel, self.grid, [a.value for a in self.arguments]))


class Pass(one_pass.OnePass):
    MAPS = ("dy", "saved", "dx")
    POINTERS = ("weight", "dw", "db", "x")

    def __init__(
        self,
        dy: Any,
        saved: Any,
        x: Any,
        weight: Tensor,
        activation: str,
        needs: Needs,
        order: str,
        slots: int = SLOTS,
    ) -> None:
        super().__init__(0)
        kernels: Any = "pass", "sums"
        maps: Any = [Map() for _ in self.MAPS]
        self._prepare_pass(driver.Launch, kernels[0], 96, 2, 66, maps, (8, 9))
        self._prepare_sums(driver.Launch, kernels[1], weight, needs, slots, 4, (10, 11))


@pytest.fixture(autouse=True)
def _stood_in(monkeypatch: pytest.MonkeyPatch) -> None:
    RUNS.clear()
    monkeypatch.setattr(one_pass, "_plans", prepared.Plans())
    monkeypatch.setattr(driver, "Launch", Launch)
    monkeypatch.setattr(driver, "TensorMap", Map)
    monkeypatch.setattr(driver, "make_current", lambda _: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 77, raising=False)


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy, saved, x, weight."""
    dy, x = torch.zeros(1, M, G, N), torch.zeros(1, M, G, K)
    return dy, torch.zeros_like(dy), x, torch.zeros(G, N, K)


@pytest.mark.parametrize("needs", list(itertools.product((True, False), repeat=3)), ids=str)
def test_the_tensors_of_a_pass_and_of_its_sums(needs: Needs) -> None:
    dy, saved, x, weight = drawn()
    results = one_pass.gradients(Pass, dy, saved, x, weight, "relu", needs, "tokens")
    assert [t is not None for t in results] == list(needs)
    dx, dw, db = [0 if t is None else t.data_ptr() for t in results]
    kernel, grid, values = RUNS[0]
    (of_dy, of_saved, of_dx, *rest), numbers = values[:-2], values[-2:]
    assert (kernel, grid, numbers) == ("pass", 66, [8, 9])
    assert (of_dy, of_saved, of_dx) == (dy.data_ptr(), saved.data_ptr(), dx)
    of_weight, of_dw, of_db, of_x = [v or 0 for v in rest]
    assert (of_weight, of_x) == (weight.data_ptr(), x.data_ptr())
    assert [of_dw != 0, of_db != 0] == list(needs[1:])
    assert len(RUNS) == 1 + any(needs[1:])
    if any(needs[1:]):  # the shares go from the pass to the sums
        kernel, grid, values = RUNS[1]
        blocks = [-(-G * N * K // 4 // 256) * needs[1], needs[2]]
        assert (kernel, grid) == ("sums", sum(blocks))
        assert [v or 0 for v in values] == [of_dw, of_db, dw, db, 10, 11, blocks[0]]
        assert not {of_dw, of_db} & {dw, db} - {0}


def test_one_share_is_the_result() -> None:
    given = drawn()
    _, dw, db = one_pass.gradients(Pass, *given, "relu", ALL, "tokens", 1)
    assert dw is not None
    assert db is not None
    ((_, _, values),) = RUNS
    assert values[4:6] == [dw.data_ptr(), db.data_ptr()]


def test_what_is_not_there_leaves_its_map_and_has_no_address() -> None:
    dy, _, x, weight = drawn()
    one_pass.gradients(Pass, dy, None, x, weight, "none", (False, True, False), "tokens")
    _, _, values = RUNS[0]
    assert values[1:3] == [0, 0]
    assert values[5] is None


def test_shares_have_room_for_every_slot() -> None:
    plan = Pass(*drawn(), "relu", ALL, "tokens")
    assert plan._shares == ((SLOTS, G, N, K), (SLOTS, G, N))
    plan = Pass(*drawn(), "relu", (True, False, True), "tokens")
    assert plan._shares == (None, (SLOTS, G, N))
    assert Pass(*drawn(), "relu", (True, False, False), "tokens")._shares == (None, None)


def test_launches_are_kept_for_tensors_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(*given: Any) -> Pass:
        made.append(given)
        return Pass(*given)

    def run(dy: Tensor, saved: Tensor | None, x: Tensor, weight: Tensor, *rest: Any) -> int:
        how = rest or ("relu", ALL, "tokens")
        one_pass.gradients(make, dy, saved, x, weight, *how)
        return len(made)

    given = dy, saved, x, weight = drawn()
    assert run(*given) == 1
    assert run(*drawn()) == 1
    apart = torch.zeros(1, M, G * N + 8)[:, :, : G * N].unflatten(2, (G, N))
    for i, other in enumerate((dy, saved, x)):
        spaced = apart if other is not x else torch.zeros(1, M, 2 * G, K)[:, :, :G]
        assert run(*(spaced if t is other else t for t in given)) == 2 + i
    assert run(dy, None, x, weight, "none", ALL, "tokens") == 5
    assert run(*given, "relu", (True, True, False), "tokens") == 6
    assert run(*given, "silu", ALL, "tokens") == 7
    assert run(*given, "relu", ALL, "tokens", SLOTS - 1) == 8
    assert run(*given) == 8
    monkeypatch.setattr(prepared, "_MAX_PLANS", 8)
    assert run(*given, "tanh", ALL, "tokens") == 9
    assert len(one_pass._plans) == 1


def test_runs_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [1]

    @contextmanager
    def device(ordinal: int) -> Iterator[None]:
        current.append(ordinal)
        yield
        current.pop()

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    one_pass.gradients(Pass, *drawn(), "relu", ALL, "tokens")
    assert [kernel for kernel, *_ in RUNS] == ["pass", "sums"]
    assert current == [1]


def test_the_dense_tensor_of_a_shape() -> None:
    spaced = torch.zeros(1, M, 2 * G, K)[:, :, :G]
    assert one_pass.row_stride(spaced, dense=False) == 2 * G * K
    assert one_pass.row_stride(spaced, dense=True) == G * K
    assert one_pass.row_stride(spaced[:, :1], dense=False) == G * K
