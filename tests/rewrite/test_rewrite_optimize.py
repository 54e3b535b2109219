"""optimize_: what it keeps, what it puts back, and what stays true of a rewritten model."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.settings import Config
from fastlinear.core.timing import Ratio
from fastlinear.profile.capture import profile
from fastlinear.rewrite import apply_, optimize_
from fastlinear.rewrite.swap.modules import Swap, SwapSet
from fastlinear.rewrite.swap.stand_in import mark
from tests.rewrite.rewrite_models import Functional, Tied, mlp, run, snapshot, statuses

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
TRAIN = Config(mode="train", draws=2, optimizer_steps=2)


@pytest.mark.usefixtures("fast")
def test_sequential_is_rewritten_and_reverted_bit_exactly() -> None:
    model = mlp().eval()
    before, expected = snapshot(model), run(model, X)
    result = optimize_(model, X)
    assert statuses(result) == {"0": "kept", "2": "kept", "4": "kept"}
    assert [s.activation for s in result.sites] == ["relu", "gelu", "none"]
    assert all(s.backends["forward"] == "onednn" for s in result.sites)
    assert result.verdicts
    assert all(v.passed for v in result.verdicts)
    assert result.speedup.median == 2.0
    assert list(model.state_dict()) == list(mlp().state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in mlp().named_modules()]
    torch.testing.assert_close(run(model, X), expected)
    assert "forward" in vars(model)
    result.revert()
    assert snapshot(model) == before
    assert torch.equal(run(model, X), expected)
    result.revert()  # a second time does nothing


@pytest.mark.usefixtures("fast")
def test_functional_parent_is_rewritten_and_guarded() -> None:
    model = Functional().eval()
    reference = copy.deepcopy(model)
    result = optimize_(model, X)
    assert [s.activation for s in result.sites] == ["gelu_tanh", "relu", "silu", "none"]
    assert [s.route for s in result.sites] == ["parent", "parent", "parent", "plain"]
    assert result.kept == 4
    calls: list[int] = []
    original = Functional.forward

    def counted(self: Functional, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return original(self, *args, **kwargs)

    torch.testing.assert_close(run(model, X), run(reference, X))
    mask = torch.ones(8, 16) * 0.5
    torch.testing.assert_close(run(model, X, mask), run(reference, X, mask))
    model.scale = reference.scale = 3.0
    torch.testing.assert_close(run(model, X), run(reference, X))
    model.activation = reference.activation = torch.tanh
    torch.testing.assert_close(run(model, X), run(reference, X))
    model.train()
    reference.train()
    torch.manual_seed(3)
    a = run(model, X)
    torch.manual_seed(3)
    torch.testing.assert_close(a, run(reference, X))
    assert counted
    assert not calls


@pytest.mark.usefixtures("fast")
def test_train_mode_compares_gradients_and_optimizer_steps() -> None:
    model = mlp()
    before = snapshot(model)
    result = optimize_(model, X, config=TRAIN)
    assert result.kept == 3
    names = {v.name for v in result.verdicts}
    assert {"output[0]", "loss", "grad.0.weight", "grad.4.bias", "grad.input[0]"} <= names
    assert {"optimizer steps: losses", "optimizer steps: 0.weight"} <= names
    assert set(result.sites[0].backends) >= {"forward", "grad_pre", "grad_input", "grad_weight"}
    assert all(p.grad is None for p in model.parameters())
    result.revert()
    assert snapshot(model) == before


@pytest.mark.usefixtures("fast")
def test_dropout_is_verified_with_the_same_masks() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    result = optimize_(model, X, config=TRAIN)
    assert result.kept == 2
    assert any("random numbers" in note for note in result.notes)


@pytest.mark.usefixtures("fast")
def test_buffers_gradients_and_random_state_stay() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    model(X).sum().backward()
    grads = [p.grad for p in model.parameters()]
    values = [g.clone() for g in grads if g is not None]
    before, state = snapshot(model), torch.get_rng_state()
    optimize_(model, X, TRAIN).revert()
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(g, v) for g, v in zip(grads, values, strict=True) if g is not None)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("make", [mlp, Functional])
def test_a_deep_copy_is_independent(make: Any) -> None:
    model = make().eval()
    result = optimize_(model, X)
    twin = copy.deepcopy(model)
    expected = run(model, X)
    assert torch.equal(run(twin, X), expected)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(run(twin, X), expected)
    assert not torch.equal(run(model, X), expected)
    for m in twin.modules():
        own = vars(m).get("forward")
        assert own is None or own.__self__ is m
    result.revert()
    assert any("forward" in vars(m) for m in twin.modules())


@pytest.mark.usefixtures("fast")
def test_pickle_state_dict_and_to_keep_working() -> None:
    model = mlp().eval()
    expected = run(model, X)
    optimize_(model, X)
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(run(loaded, X), expected)
    assert optimize_(loaded, X).kept == 3
    fresh = mlp().eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(run(fresh, X), expected)
    model.load_state_dict(mlp().state_dict())
    assert not torch.allclose(run(model, X), expected)
    assert run(model.double(), X.double()).dtype is torch.float64
    assert model.train().training
    assert run(model.float().eval(), X[:3]).shape == (3, 4)


@pytest.mark.usefixtures("fast")
def test_a_saved_optimizer_continues() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(m: nn.Module, o: torch.optim.Optimizer) -> float:
        o.zero_grad()
        loss = m(X).square().mean()
        loss.backward()
        o.step()
        return float(loss)

    step(model, optimizer)
    stored = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stored)
    twin = mlp()
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    stored.seek(0)
    data = torch.load(stored, weights_only=True)
    twin.load_state_dict(data["model"])
    other.load_state_dict(data["optimizer"])
    assert optimize_(twin, X, config=TRAIN).kept == 3
    for _ in range(4):
        assert step(twin, other) == pytest.approx(step(model, optimizer), rel=1e-5)


@pytest.mark.usefixtures("fast")
def test_tied_weights_stay_tied() -> None:
    model = Tied().eval()
    assert optimize_(model, X).kept == 2
    assert model.a.weight is model.b.weight


@pytest.mark.usefixtures("fast")
def test_a_second_optimize_finds_nothing() -> None:
    model = mlp().eval()
    first = optimize_(model, X)
    second = optimize_(model, X)
    assert {s.code for s in second.sites} == {"already_rewritten"}
    assert second.nothing_to_do == 3
    assert (
        "already rewritten by fastlinear, and left so: the model itself, 4; revert()"
        in second.table()
    )
    second.revert()
    assert "forward" in vars(model)
    first.revert()
    assert "forward" not in vars(model)
    again = optimize_(model, X)
    assert not any("already" in note for note in again.notes)
    again.revert()


@pytest.mark.usefixtures("fast")
def test_linears_in_a_rewritten_forward_are_told_so() -> None:
    model = mlp().eval()
    holder = torch.nn.Sequential(model)
    mine = SwapSet([Swap("0", model, mark(lambda self, x: type(self).forward(self, x)))])
    mine.on()
    result = optimize_(holder, X)
    assert {s.code for s in result.sites} == {"already_rewritten"}
    assert {s.reason for s in result.sites} == {
        "optimize_ has rewritten '0', in which it lies, already."
    }
    assert "left so: 0; revert()" in result.table()
    mine.off()


def test_a_model_without_linears_is_told_in_words() -> None:
    result = optimize_(torch.nn.Sequential(torch.nn.ReLU()), X)
    assert "no linear layers here, neither modules nor products" in result.table()
    assert "nothing to optimize" in result.table()
    report = profile(torch.nn.Sequential(torch.nn.ReLU()), X, steps=1)
    assert "no linear layers here" in report.table()


@pytest.mark.usefixtures("fast")
def test_bad_arguments() -> None:
    model = mlp()
    before = snapshot(model)
    with pytest.raises(InputError, match="inputs"):
        optimize_(model, 3)
    with pytest.raises(InputError, match=r"nn\.Module"):
        optimize_("model", X)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Config"):
        optimize_(model, X, config={"mode": "train"})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Config"):
        optimize_(model, X, config={})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="filter_fn to be a function"):
        optimize_(model, X, filter_fn="a")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="loss_fn to be a function"):
        optimize_(model, X, loss_fn="a")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="apply_: expected a plan: its path"):
        apply_(model, 5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a backend of linear_act"):
        optimize_(model, X, config=Config(backends={"linear_act": "fastest"}))
    with pytest.raises(InputError, match="families"):
        optimize_(model, X, config=Config(backends={"conv": "eager"}))
    with pytest.raises(InputError, match="shapes cannot be multiplied"):
        optimize_(model, torch.randn(3, 5))
    with pytest.raises(InputError, match="must have the same dtype"):
        optimize_(model, X.long())
    with pytest.raises(InputError, match="device"):
        optimize_(model, X.to("meta"))
    with pytest.raises(InputError, match=r"a loss_fn that takes its output; received TypeError"):
        optimize_(model, X, config=TRAIN, loss_fn=lambda: None)  # type: ignore[misc, arg-type]
    assert snapshot(model) == before


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(("family", "backend"), [("linear_act", "cublaslt"), ("mlp", "whole_cuda")])
def test_a_forced_backend_that_can_serve_nothing_is_an_error(family: str, backend: str) -> None:
    model = mlp()
    before = snapshot(model)
    config = Config(tune=False, backends={family: backend})
    with pytest.raises(UnsupportedError, match=rf"'{backend}' of {family}.*CUDA.*Leave") as raised:
        optimize_(model, X, config=config)
    assert raised.value.exit_code == 5
    assert snapshot(model) == before


@pytest.mark.usefixtures("fast")
def test_json_table_and_filter() -> None:
    import json

    model = mlp().eval()
    result = optimize_(model, X, filter_fn=lambda m, fqn: fqn != "2")
    data = json.loads(json.dumps(result.to_json()))
    assert data["kind"] == "optimize"
    assert data["summary"] == {
        "kept": 2,
        "rejected": 0,
        "refused": 1,
        "undecided": 0,
        "nothing_to_do": 0,
    }
    assert {s["fqn"]: s["code"] for s in data["sites"]}["2"] == "filtered"
    assert data["step"]["speedup"]["median"] == 2.0
    assert data["profile"]["kind"] == "profile"
    assert len(data["step"]["samples"]["before"]) == 5
    text = result.table()
    assert "filter_fn leaves it out" in text
    assert "2 kept" in text
    assert "2 kept" in str(result)
    assert str(result).endswith("; 2.000 [2.000, 2.000]x")
    kept_in_noise = replace(result, speedup=Ratio(1.0, 0.9, 1.1))
    assert str(kept_in_noise).endswith("x (within noise)")
    assert str(replace(result, sites=())).endswith("; the model is as it was")


@pytest.mark.usefixtures("fast")
def test_revert_refuses_to_undo_somebody_elses_change() -> None:
    model = mlp().eval()
    result = optimize_(model, X)
    mine = model[4].forward
    model[4].forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(InputError, match="another forward on 4"):
        result.revert()
    model[4].__dict__["forward"] = mine
    result.revert()
    assert "forward" not in vars(model[4])
