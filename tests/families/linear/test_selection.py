"""From tensors to the Problem that stands for them: nothing chosen may refuse the real call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.dispatch import backend as registry
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import Backend, family
from fastlinear.dispatch.tune import tune
from fastlinear.families.linear import backends, reference
from fastlinear.families.linear import problem as posed
from fastlinear.families.linear.autograd import backward_of
from fastlinear.families.linear.cuda import gemm
from fastlinear.families.linear.selection import choices_of, problem_of, tuning_order
from fastlinear.families.linear.triton import config

HOPPER = (9, 0)


def half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def inputs(m: int, k: int) -> Iterator[Tensor]:
    """x (M, K) as callers lay it out: dense, padded, sliced, expanded, overlapping."""
    yield half(m, k)
    yield half(k, m).t()
    yield half(1, k).expand(m, k)
    yield half(m, 1).expand(m, k)
    yield half(m, k + 1)[:, 1:]
    yield half(m, k + 8)[:, :k]
    yield half(m, 2 * k)[:, ::2]
    yield half(m + k).as_strided((m, k), (1, 1))
    yield half(8 * m + k).as_strided((m, k), (8, 1))


def weights(n: int, k: int) -> Iterator[Tensor]:
    """weight (N, K) as callers lay it out."""
    yield half(n, k)
    yield half(k, n).t()
    yield half(1, k).expand(n, k)
    yield half(n, k + 8)[:, :k]
    yield half(n + k).as_strided((n, k), (1, 1))


@pytest.mark.parametrize("k", [1, 2, 7, 8, 15, 16, 24])
@pytest.mark.parametrize(("m", "n"), [(1, 8), (2, 8), (8, 16), (9, 24), (8, 1)])
def test_what_a_problem_promises_holds_for_its_tensors(m: int, n: int, k: int) -> None:
    served = 0
    for x in inputs(m, k):
        for w in weights(n, k):
            p = problem_of(x, w, None, "relu", False)
            facts: tuple[Any, ...] = (m, k, n, torch.bfloat16)
            promised = gemm.reason_not(*facts, *backends._strides(p), HOPPER) is None
            real = gemm.reason_not(*facts, x.stride(), w.stride(), HOPPER)
            assert not promised or real is None, (x.stride(), w.stride(), p.describe(), real)
            served += promised
            strides = (x.stride(), w.stride())
            assert config.reason_not(*facts, "relu", *strides, HOPPER) is None
    assert served > 0 or n % 8 or (k % 8 and k > 1)


@pytest.mark.parametrize(
    ("x", "word"),
    [
        (torch.empty(4, 8), "rows"),
        (torch.empty(2, 3, 8), "rows"),
        (torch.empty(1, 11)[:, :7], "rows"),
        (torch.empty(4, 16)[:, :8], "rows"),
        (torch.empty(4, 9)[:, :8], "rows_odd"),
        (torch.empty(1, 8).expand(4, 8), "rows_odd"),
        (torch.empty(12).as_strided((4, 8), (1, 1)), "rows_odd"),
        (torch.empty(8, 4).t(), "strided"),
        (torch.empty(0, 8), "rows"),
    ],
)
def test_words_for_the_layout_of_x(x: Tensor, word: str) -> None:
    weight = torch.empty(5, x.shape[-1])
    assert problem_of(x, weight, None, "none", False).option("x") == word


# --------------------------------------------------------------------------------------------
# The step as a whole


def training(**facts: Any) -> Any:
    return posed.problem(
        "forward", 64, 32, 32, dtype="float32", device="cpu", activation="gelu_tanh",
        needs_grad=True, precision="highest", **facts,
    )  # fmt: skip


def decide(p: Any, **best: str) -> None:
    """Put the winners of some pieces into the user's cache."""
    for piece, name in best.items():
        q = p.with_piece(piece)
        able = [b for b in family("linear_act").candidates(piece) if b.name in ("eager", name)]
        cache.store(q, able, name, {b.name: 2.0 - (b.name == name) for b in able})


def test_the_step_decides_between_torchs_autograd_and_the_pieces() -> None:
    p = training()
    decide(p, forward="onednn", step="eager")
    chosen = {c.problem.piece: c for c in choices_of(p)}
    assert {c.backend.name for c in chosen.values()} == {"eager"}
    assert chosen["forward"].source == "tuned"
    assert "the whole step" in chosen["forward"].reason
    decide(p, step="pieces")
    chosen = {c.problem.piece: c for c in choices_of(p)}
    assert chosen["forward"].backend.name == "onednn"
    assert chosen["step"].backend.name == "pieces"
    # a forced forward is the caller's word
    decide(p, step="eager")
    assert choices_of(p, "onednn")[0].backend.name == "onednn"


def test_where_every_piece_is_torchs_the_step_may_be_ours() -> None:
    """One node of autograd for torch's own ops costs less than torch's nodes."""
    p = training()
    decide(p, forward="eager", grad_pre="eager", grad_input="eager", grad_weight="eager")
    decide(p, step="eager")
    assert [c.problem.piece for c in choices_of(p)] == list(posed.PIECES)
    decide(p, step="pieces")
    assert [c.problem.piece for c in choices_of(p)] == [*posed.PIECES, "step"]


def test_one_backend_may_compute_the_whole_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    p = training()
    target = "fastlinear.families.linear.reference:backward"
    whole = Backend("linear_act", "backward", "whole", target, lambda _: None)
    fam = replace(backends.FAMILY, backends=(*backends.FAMILY.backends, whole))
    monkeypatch.setitem(registry._FAMILIES, "linear_act", fam)
    decide(p, forward="onednn", grad_input="onednn", backward="whole", step="pieces")
    chosen = choices_of(p)
    assert [c.problem.piece for c in chosen] == ["forward", "backward", "step"]
    assert [c.backend.name for c in chosen] == ["onednn", "whole", "pieces"]
    assert backward_of(chosen) is reference.backward
    decide(p, backward="pieces")
    assert [c.problem.piece for c in choices_of(p)] == [*posed.PIECES, "step"]
    assert choices_of(p)[2].backend.name == "onednn"
    decide(p, backward="eager")
    chosen = choices_of(p)
    assert [c.backend.name for c in chosen] == ["onednn", "eager", "eager", "eager", "pieces"]
    assert "the whole backward" in chosen[2].reason
    decide(p, backward="whole", step="eager")
    chosen = choices_of(p)
    assert [c.problem.piece for c in chosen] == [*posed.PIECES, "step"]
    assert {c.backend.name for c in chosen} == {"eager"}


def test_the_whole_backward_is_tuned_where_one_launch_can_compute_it() -> None:
    def order(m: int, device: str) -> list[str]:
        p = posed.problem("forward", m, 32, 32, dtype="bfloat16", device=device, needs_grad=True)
        return [q.piece for q in tuning_order(p)]

    assert order(4096, "cuda") == [*posed.PIECES, "backward", "step"]
    assert order(4097, "cuda") == order(64, "cpu") == [*posed.PIECES, "step"]


def test_tuning_the_step_measures_both_and_agrees_on_numbers() -> None:
    p = training()
    tuned = [tune(q, rounds=5, budget_s=0.2) for q in tuning_order(p)]
    assert [t.problem.piece for t in tuned] == [*posed.PIECES, posed.STEP]
    assert set(tuned[-1].samples) == {"eager", "pieces"}
    assert tuned[-1].rejected == {}
    assert all(t.samples["eager"].metric == "wall" for t in tuned)


def test_three_tf32_products_stay_away_where_pytorch_is_more_accurate() -> None:
    def why(
        m: int, k: int, n: int, piece: str = "forward", precision: str = "highest"
    ) -> str | None:
        p = posed.problem(
            piece, m, k, n, dtype="float32", device="cuda", precision=precision, needs_grad=True
        )
        return backends._reason_not_precise(p)

    for m, k, refused in (
        (4, 512, False),  # multiplied and added in float32
        (8, 64, False),  # short: the same
        (8, 128, True),
        (16, 4096, True),
        (32, 512, True),
        (32, 1024, False),
        (128, 512, True),
        (128, 1024, False),
        (256, 256, False),
    ):
        assert (why(m, k, 2048) is not None) is refused, (m, k)
        assert (why(m, 2048, k, "grad_input") is not None) is refused, (m, k)
        assert (why(m, 2048, k, "backward") is not None) is refused, (m, k)
        assert why(m, k, 2048, precision="high") is None
    half = posed.problem("forward", 8, 512, 512, dtype="bfloat16", device="cuda")
    assert backends._reason_not_precise(half) is None
