"""Every family × backend × piece this machine can run keeps the contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.dispatch.backend import Backend, families, family
from fastlinear.families.diagonal.problem import problem as diagonal_problem
from fastlinear.families.gated.problem import problem as gated_problem
from fastlinear.families.grouped.problem import problem as grouped_problem
from fastlinear.families.linear.problem import problem as linear_act_problem
from fastlinear.families.mlp.problem import problem as mlp_problem
from tests.families.contract import flat, in_float64


def tiles_spread_nan(device: str, dtype: str) -> bool:
    """Whether PyTorch's own products here carry a NaN to neighbours: oneDNN's of bfloat16 on a CPU
    with AMX do where the depth is odd (docs/facts.md)."""
    asked = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return device == "cpu" and dtype == "bfloat16" and asked is not None and asked()


def discovered() -> list[Any]:
    """One parameter per backend, piece and device; those for CUDA are skipped without one."""
    found = []
    for fam in families().values():
        for backend in fam.backends:
            name = f"{fam.name}.{backend.piece}-{backend.name}"
            found.append(pytest.param(backend, "cpu", id=f"{name}-cpu"))
            found.append(pytest.param(backend, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu))
    return found


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("backend", "device"), discovered())
def test_backend_keeps_the_contract(
    backend: Backend, device: str, dtype: str, contract: Any
) -> None:
    """Twice torch's error at most, deterministic, inputs untouched, outputs fully written."""
    served = 0
    reason = ""
    for problem in contract.problems(backend.family, backend.piece, dtype, device):
        why = backend.reason_not(problem)
        if why is not None:
            reason = why
            continue
        served += 1
        assert contract.failures(backend, problem) == [], problem.describe()
    if not served:
        pytest.skip(f"serves no {dtype} problem here: {reason}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("backend", "device"), discovered())
def test_nan_and_infinity_propagate_as_torchs(
    backend: Backend, device: str, dtype: str, contract: Any
) -> None:
    """NaN comes out just where torch's comes out; an infinity never comes out as a number."""
    served = 0
    for problem in contract.problems(backend.family, backend.piece, dtype, device):
        if problem.dim("M") < 3 or backend.reason_not(problem) is not None:
            continue
        served += 1
        fam = family(backend.family)
        for bad in (float("nan"), float("inf")):
            inputs = fam.make_inputs(problem, torch.device(device), 0)
            first = inputs[0] if isinstance(inputs[0], torch.Tensor) else inputs[0][0]
            first[0, 0] = bad
            spread = tiles_spread_nan(device, dtype)
            oracle = in_float64(inputs) if spread and bad != bad else inputs
            expected, actual = fam.reference(problem, oracle), backend.load(problem)(*inputs)
            for e, a in zip(flat(expected), flat(actual), strict=True):
                if e is None:
                    continue
                if bad != bad and spread:
                    assert torch.isnan(a)[torch.isnan(e)].all(), problem.describe()
                elif bad != bad:
                    assert torch.equal(torch.isnan(a), torch.isnan(e)), problem.describe()
                assert not torch.isfinite(a)[torch.isinf(e)].any(), problem.describe()
    if not served:
        pytest.skip(f"serves no {dtype} problem here")


def test_registry_is_complete() -> None:
    """Every piece has its eager baseline, and every record states what it is."""
    for fam in families().values():
        for piece in fam.pieces:
            names = [b.name for b in fam.candidates(piece)]
            assert "eager" in names
            assert len(names) == len(set(names))
        assert {b.piece for b in fam.backends} == set(fam.pieces)
        for backend in fam.backends:
            assert len(backend.source_hash()) == 12


def test_capability_checks_stay_off_the_gpu(contract: Any) -> None:
    """Asking why not about a CPU problem initialises nothing."""
    for fam in families().values():
        for backend in fam.backends:
            backend.reason_not(next(contract.problems(fam.name, backend.piece, "float32", "cpu")))
    if not torch.cuda.is_available():
        assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("piece", ["forward", "grad_pre", "grad_input", "grad_weight"])
def test_cost_counts_each_tensor_once(piece: str) -> None:
    """The least bytes of a piece are what its inputs and outputs hold; flops are the GEMMs'."""
    fam = family("linear_act")
    for activation in ("relu", "gelu", "none"):
        p = linear_act_problem(
            piece, 5, 3, 4, dtype="float32", device="cpu", activation=activation, needs_grad=True
        )
        inputs = fam.make_inputs(p, torch.device("cpu"), 0)
        tensors = [i for i in inputs if isinstance(i, torch.Tensor)]
        tensors += [o for o in flat(fam.reference(p, inputs)) if o is not None]
        cost = fam.cost(p)
        assert cost.bytes == sum(t.numel() * t.element_size() for t in tensors)
        gemms = {"forward": 1, "grad_pre": 0, "grad_input": 1, "grad_weight": 1}
        assert cost.flops == gemms[piece] * 2 * 5 * 3 * 4


@pytest.mark.parametrize("piece", ["forward", "backward"])
def test_cost_of_a_chain_counts_each_tensor_once(piece: str) -> None:
    """As above: what the backward does not read of ``saved`` (y after no activation) is not
    counted, nor is y twice where the forward keeps it."""
    fam = family("mlp")
    for activation, final in (("relu", "none"), ("gelu", "tanh"), ("relu", "gelu")):
        p = mlp_problem(
            piece,
            5,
            (3, 4, 7),
            dtype="float32",
            device="cpu",
            activation=activation,
            final_activation=final,
            bias="some",
            needs_grad=True,
        )
        inputs = fam.make_inputs(p, torch.device("cpu"), 0)
        tensors = {id(t): t for t in flat(inputs) + flat(fam.reference(p, inputs)) if t is not None}
        numbers = sum(t.numel() for t in tensors.values())
        if piece == "backward" and final == "none":
            numbers -= 5 * 7
        cost = fam.cost(p)
        assert cost.bytes == 4 * numbers
        assert cost.flops == (1 if piece == "forward" else 2) * 2 * 5 * (3 * 4 + 4 * 7)


@pytest.mark.parametrize("piece", ["forward", "backward"])
def test_cost_of_a_diagonal_counts_each_tensor_once(piece: str) -> None:
    """As above; the bias is not read by the backward of no activation."""
    fam = family("diagonal_linear")
    for activation in ("none", "relu", "gelu"):
        p = diagonal_problem(
            *(piece, 5, 3), dtype="float32", device="cpu", activation=activation, residual=True
        )
        inputs = fam.make_inputs(p, torch.device("cpu"), 0)
        tensors = [t for t in flat(inputs) + flat(fam.reference(p, inputs)) if t is not None]
        numbers = sum(t.numel() for t in tensors)
        if piece == "backward" and activation == "none":
            numbers -= 3
        assert fam.cost(p).bytes == 4 * numbers
        assert fam.cost(p).flops == 0


@pytest.mark.parametrize("piece", ["forward", "backward"])
def test_cost_of_groups_counts_each_tensor_once(piece: str) -> None:
    """As above."""
    fam = family("grouped_linear")
    for activation, order in (("relu", "tokens"), ("gelu", "channels"), ("none", "groups")):
        p = grouped_problem(
            piece,
            *(6, 2, 3, 4),
            dtype="float32",
            device="cpu",
            activation=activation,
            needs_grad=True,
            order=order,
            length=3,
        )
        inputs = fam.make_inputs(p, torch.device("cpu"), 0)
        tensors = [i for i in inputs if isinstance(i, torch.Tensor)]
        tensors += [o for o in flat(fam.reference(p, inputs)) if o is not None]
        cost = fam.cost(p)
        assert cost.bytes == sum(t.numel() * t.element_size() for t in tensors)
        assert cost.flops == {"forward": 1, "backward": 2}[piece] * 2 * 6 * 2 * 3 * 4


@pytest.mark.parametrize("piece", ["forward", "backward"])
def test_cost_of_a_gate_counts_each_tensor_once(piece: str) -> None:
    """As above; the backward reads no bias but to form the pre-activations again."""
    fam = family("gated_mlp")
    for n in (0, 7):
        for order in ("apart", "interleaved"):
            for recompute in (False, True):
                p = gated_problem(
                    piece,
                    *(5, 3, 4, n),
                    dtype="float32",
                    device="cpu",
                    bias="yes",
                    needs_grad=True,
                    order=order,
                    recompute=recompute,
                )
                inputs = fam.make_inputs(p, torch.device("cpu"), 0)
                tensors = [
                    t for t in flat(inputs) + flat(fam.reference(p, inputs)) if t is not None
                ]
                numbers = sum(t.numel() for t in tensors)
                read = (
                    sum(t.numel() for t in inputs[4] if t is not None) if piece != "forward" else 0
                )
                # of the biases, a down projection's is not read again
                unread = read if not recompute else n
                cost = fam.cost(p)
                assert cost.bytes == 4 * (numbers - (unread if piece == "backward" else 0))
                products = {"forward": 1, "backward": 2}[piece]
                again = 4 * 5 * 3 * 4 if recompute and piece == "backward" else 0
                assert cost.flops == products * 2 * 5 * (3 * 8 + 4 * n) + again
