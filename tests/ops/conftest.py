"""The contract every backend of every family keeps, as one check used by several tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastlinear.core.compare import judge
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import Backend, family
from fastlinear.ops.common import door, door_node
from fastlinear.ops.common.activations import NAMES as ACTIVATIONS
from fastlinear.ops.diagonal_linear.problem import problem as diagonal_problem
from fastlinear.ops.gated_mlp.problem import problem as gated_problem
from fastlinear.ops.gated_mlp.stacking import ORDERS as GATED_ORDERS
from fastlinear.ops.grouped_linear.problem import problem as grouped_problem
from fastlinear.ops.linear_act.problem import problem as linear_act_problem
from fastlinear.ops.mlp.problem import problem as mlp_problem
from fastlinear.ops.ragged_linear.problem import problem as ragged_problem
from fastlinear.ops.unequal_linear.problem import problem as unequal_problem

# (M, K, N): ones, odd tails on either side of a tile, and one of each kind longest
DRAWS = 24
SHAPES = ((1, 1, 1), (7, 33, 65), (1, 65, 7), (33, 7, 1), (65, 1, 33), (33, 65, 64), (7, 7, 7))
# (M, widths): one layer and several, equal and odd, one row and a block's tail
CHAINS = (
    (1, (16, 16, 16)),
    (7, (33, 65, 17)),
    (70, (64, 64, 64, 64)),
    (1, (7, 33)),
    (5, (1, 20, 3, 9)),
    (33, (65, 40, 31)),
)
# (M, K): ones, few features and many, tails of rows that are read side by side
DIAGONALS = ((1, 1), (7, 33), (65, 16), (300, 24), (33, 130), (3, 1100), (130, 3), (17, 256))

# (M, G, K, N, L): ones, tails, sizes that no tile divides, large groups; L is for channels first
GROUPS = (
    (1, 1, 1, 1, 1),
    (12, 3, 5, 7, 4),
    (70, 2, 33, 20, 35),
    (40, 2, 100, 100, 10),
    (66, 3, 17, 50, 3),
    (36, 1, 136, 24, 18),
    (7, 5, 24, 130, 7),
)

# (M, K, H, N): ones, tails on either side of a tile; N = 0 is gated_linear
GATED = (
    (1, 1, 1, 1),
    (7, 33, 20, 5),
    (65, 16, 33, 0),
    (40, 24, 48, 16),
    (3, 65, 130, 33),
    (33, 7, 17, 64),
    (5, 20, 7, 0),
)


class Contract:
    """Problems to pose, and what a backend does wrong on one of them."""

    def problems(self, family_name: str, piece: str, dtype: str, device: str) -> Iterator[Problem]:
        """What every backend of a piece is asked; a new family must be taught here."""
        of = {
            "diagonal_linear": self.diagonal_problems,
            "gated_mlp": self.gated_problems,
            "grouped_linear": self.grouped_problems,
            "linear_act": self.linear_act_problems,
            "mlp": self.mlp_problems,
            "ragged_linear": self.ragged_problems,
            "unequal_linear": self.unequal_problems,
        }
        return of[family_name](piece, dtype, device)

    def diagonal_problems(self, piece: str, dtype: str, device: str) -> Iterator[Problem]:
        """Every activation with every layout, bias and residual; sizes take turns."""
        sizes = itertools.cycle(DIAGONALS)
        turns = itertools.cycle(
            itertools.product(("rows", "rows_apart", "strided"), (True, False), (True, False))
        )
        for activation in ACTIVATIONS:
            for _ in range(7):  # coprime to the number of turns
                x_layout, bias, residual = next(turns)
                yield diagonal_problem(
                    piece,
                    *next(sizes),
                    dtype=dtype,
                    device=device,
                    activation=activation,
                    bias=bias,
                    residual=residual,
                    needs_grad=piece != "forward",
                    x_layout=x_layout,
                )

    def gated_problems(self, piece: str, dtype: str, device: str) -> Iterator[Problem]:
        """Every activation with every order of the halves, stride, bias, level and grad flag."""
        sizes = itertools.cycle(GATED)
        turns = itertools.cycle(
            itertools.product(
                ("yes", "no", "some"), ("dense", "strided"), ("dense", "strided"), GATED_ORDERS
            )
        )
        for activation in ACTIVATIONS:
            for i in range(5):  # coprime to the numbers of sizes and of turns
                bias, x, w, order = next(turns)
                yield gated_problem(
                    piece,
                    *next(sizes),
                    dtype=dtype,
                    device=device,
                    activation=activation,
                    bias=bias,
                    needs_grad=piece != "forward" or i % 2 == 0,
                    order=order,
                    recompute=piece != "step" and i == 2,
                    x=x,
                    w=w,
                    precision=matmul_precision(FLOAT_DTYPES[dtype]),
                )

    def grouped_problems(self, piece: str, dtype: str, device: str) -> Iterator[Problem]:
        """Every activation with every order, stride, bias and grad flag; sizes take turns."""
        sizes = itertools.cycle(GROUPS)
        turns = itertools.cycle(
            itertools.product(
                ("tokens", "groups", "channels"),
                ("dense", "strided"),
                ("dense", "strided"),
                (True, False),
            )
        )
        for activation in ACTIVATIONS:
            for i in range(5):  # coprime to the numbers of sizes and of turns
                order, x, w, bias = next(turns)
                m, groups, k, n, length = next(sizes)
                yield grouped_problem(
                    piece,
                    *(m, groups, k, n),
                    dtype=dtype,
                    device=device,
                    activation=activation,
                    bias=bias,
                    needs_grad=piece != "forward" or i % 2 == 0,
                    order=order,
                    length=length,
                    x="dense" if piece == "step" else x,
                    w=w,
                    precision=matmul_precision(FLOAT_DTYPES[dtype]),
                )

    def ragged_problems(self, piece: str, dtype: str, device: str) -> Iterator[Problem]:
        """Every activation with and without bias; sizes take turns."""
        sizes = itertools.cycle(GROUPS)
        for activation in ACTIVATIONS:
            for i in range(3):
                m, groups, k, n, _ = next(sizes)
                yield ragged_problem(
                    piece,
                    *(m, groups, k, n),
                    dtype=dtype,
                    device=device,
                    activation=activation,
                    bias=i % 2 == 0,
                    needs_grad=piece != "forward",
                    precision=matmul_precision(FLOAT_DTYPES[dtype]),
                )

    def unequal_problems(self, piece: str, dtype: str, device: str) -> Iterator[Problem]:
        """Every activation with biases, some and none; sizes take turns."""
        sizes = itertools.cycle(GROUPS)
        for activation in ACTIVATIONS:
            for i, bias in enumerate(("yes", "no", "some")):
                m, groups, k, n, _ = next(sizes)
                yield unequal_problem(
                    piece,
                    *(m, groups, k, n),
                    dtype=dtype,
                    device=device,
                    activation=activation,
                    bias=bias,
                    needs_grad=piece != "forward",
                    rows="aligned" if i else "unaligned",
                    precision=matmul_precision(FLOAT_DTYPES[dtype]),
                )

    def mlp_problems(self, piece: str, dtype: str, device: str) -> Iterator[Problem]:
        """Every activation, also as the last one, with layouts, biases and grad flags in turn."""
        chains = itertools.cycle(CHAINS)
        layouts = itertools.cycle(
            itertools.product(("rows", "strided"), ("nk", "mixed"), ("yes", "no", "some"))
        )
        for i, activation in enumerate(ACTIVATIONS):
            for j in range(2 if device == "cuda" else 4):
                m, widths = next(chains)
                x_layout, w_layout, bias = next(layouts) if j % 2 else ("rows", "nk", "yes")
                yield mlp_problem(
                    piece,
                    m,
                    widths,
                    dtype=dtype,
                    device=device,
                    activation=activation,
                    final_activation=ACTIVATIONS[(i + 3 * j) % len(ACTIVATIONS)],
                    bias=bias,
                    needs_grad=piece != "forward" or j < 2,
                    x_layout=x_layout,
                    w_layout=w_layout,
                    precision=matmul_precision(FLOAT_DTYPES[dtype]),
                )

    def linear_act_problems(self, piece: str, dtype: str, device: str) -> Iterator[Problem]:
        """Every activation with every layout, bias and grad flag; shapes take turns."""
        shapes = itertools.cycle(SHAPES)
        layouts = list(
            itertools.product(("rows", "strided"), ("nk", "kn"), (True, False), (True, False))
        )
        # a stride coprime to 16 walks through all combinations, a few per activation
        turns = itertools.cycle(layouts[i * 5 % 16] for i in range(16))
        gemm_only = piece in ("grad_input", "grad_weight")
        for activation in ("none",) if gemm_only else ACTIVATIONS:
            for _ in range(16 if gemm_only else 3 if device == "cuda" else 7):
                x_layout, w_layout, bias, needs_grad = next(turns)
                yield linear_act_problem(
                    piece,
                    *next(shapes),
                    dtype=dtype,
                    device=device,
                    activation=activation,
                    bias=bias,
                    needs_grad=needs_grad or piece != "forward",
                    x_layout=x_layout,
                    w_layout=w_layout,
                    precision=matmul_precision(FLOAT_DTYPES[dtype]),
                )

    def in_float64(self, arguments: Any) -> Any:
        """The same arguments with every tensor in float64."""
        return in_float64(arguments)

    def inaccuracies(self, backend: Backend, problem: Problem, seed: int = 0) -> list[str]:
        """Where the backend's error exceeds twice torch's.

        One number's error is luck, so outputs of a few numbers are judged over many draws.
        """
        fam, device = family(problem.family), torch.device(problem.device)
        inputs = fam.make_inputs(problem, device, seed)
        found = list(triples(backend, problem, inputs))
        verdicts = [
            judge(f"{backend.name}[{i}]", *(t for t in triple if t is not None))
            for i, triple in enumerate(found)
            if all(t is not None for t in triple)
        ]
        verdicts = [v for v in verdicts if not v.passed]
        if not verdicts or all(t[0] is None or t[0].numel() >= 256 for t in found):
            return [str(v) for v in verdicts]
        columns: list[list[Triple]] = []
        for draw in range(DRAWS):
            inputs = fam.make_inputs(problem, device, seed + draw)
            for i, triple in enumerate(triples(backend, problem, inputs)):
                if i == len(columns):
                    columns.append([])
                columns[i].append(triple)
        verdicts = []
        for i, column in enumerate(columns):
            ours, theirs, oracle = zip(*column, strict=True)
            if oracle[0] is None or ours[0] is None:
                continue  # a missing output is for ``failures`` to tell
            stacked = (torch.stack(t) for t in (ours, theirs, oracle))
            verdicts.append(judge(f"{backend.name}[{i}]", *stacked))
        return [str(v) for v in verdicts if not v.passed]

    def failures(self, backend: Backend, problem: Problem, seed: int = 0) -> list[str]:
        """What the backend does wrong on one Problem, as readable lines; empty when nothing."""
        fam = family(problem.family)
        device = torch.device(problem.device)
        inputs = fam.make_inputs(problem, device, seed)
        kept = [t if t is None else t.clone() for t in flat(inputs)]
        run = backend.load()
        wrong = self.inaccuracies(backend, problem, seed)

        expected = flat(fam.reference(problem, inputs))
        with poisoned_memory():
            first, second = flat(run(*inputs)), flat(run(*inputs))
        for i, (e, a, b) in enumerate(zip(expected, first, second, strict=True)):
            if (e is None) != (a is None):
                wrong.append(f"output {i}: is None where torch's is not, or the reverse")
            if e is None or a is None or b is None:
                continue
            if (a.shape, a.dtype, a.device) != (e.shape, e.dtype, e.device):
                wrong.append(f"output {i}: {a.shape} {a.dtype} {a.device}")
            elif not torch.isfinite(a).all():
                wrong.append(f"output {i}: not fully written")
            if not torch.equal(a, b):
                wrong.append(f"output {i}: two runs differ")
        for i, (now, before) in enumerate(zip(flat(inputs), kept, strict=True)):
            if now is not None and before is not None and not torch.equal(now, before):
                wrong.append(f"input {i}: modified")
        return wrong


Triple = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def triples(backend: Backend, problem: Problem, inputs: tuple[Any, ...]) -> Iterator[Triple]:
    """(ours, torch's, the float64 oracle) for every output."""
    fam = family(problem.family)
    wide = in_float64(inputs)
    ours = flat(backend.load()(*inputs))
    return zip(
        ours, flat(fam.reference(problem, inputs)), flat(fam.reference(problem, wide)), strict=True
    )


class poisoned_memory:
    """Inside it, torch fills every new tensor with NaN, so that unwritten entries show."""

    def __enter__(self) -> None:
        self.before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True

    def __exit__(self, *_: object) -> None:
        mode, warn_only, fill = self.before
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def flat(result: Any) -> list[torch.Tensor | None]:
    """The tensors (and Nones) of a result or of arguments, tuples in tuples opened."""
    if isinstance(result, (tuple, list)):
        return [t for item in result for t in flat(item)]
    return [result] if result is None or isinstance(result, torch.Tensor) else []


def in_float64(arguments: Any) -> Any:
    """The same arguments with every tensor in float64."""
    if isinstance(arguments, tuple):
        return tuple(in_float64(a) for a in arguments)
    floating = isinstance(arguments, torch.Tensor) and arguments.is_floating_point()
    return arguments.double() if floating else arguments


@pytest.fixture
def contract() -> Contract:
    """The contract of all backends."""
    return Contract()


@pytest.fixture(scope="session")
def nodes_built() -> None:
    """The compiled door and its nodes are loaded."""
    assert door.wait(), door.reason_not()
    assert door_node.wait(), door_node.reason_not()
