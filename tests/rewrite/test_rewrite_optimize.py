"""optimize_: what it keeps, what it puts back, and what stays true of a rewritten model."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from rewrite_models import Clock, Functional, Raises, Tied, mlp, run, snapshot
from torch import Tensor, nn

from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.settings import Config
from fastlinear.core.timing import Samples
from fastlinear.dispatch import backend as registry
from fastlinear.rewrite import apply_, finish, optimize_
from fastlinear.rewrite.trial import measure
from fastlinear.rewrite.trial import site as site_module
from fastlinear.rewrite.verify import model as verify
from fastlinear.rewrite.verify import verdicts

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
TRAIN = Config(mode="train", draws=2, optimizer_steps=2)


def statuses(result: Any) -> dict[str, str]:
    return {s.fqn: s.status for s in result.sites}


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
    assert "forward" in vars(model[0])
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
    optimize_(model, X, config=TRAIN).revert()
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
    second.revert()
    assert "forward" in vars(model[0])
    first.revert()
    assert "forward" not in vars(model[0])


def test_eager_best_is_nothing_to_do(clock: Clock) -> None:
    clock({"onednn": 200.0, "onednn_packed": 200.0})
    model = mlp().eval()
    result = optimize_(model, X)
    assert result.nothing_to_do == 3
    assert {s.code for s in result.sites} == {"eager_is_best"}
    assert "forward" not in vars(model[0])


def test_a_slower_site_is_rejected(clock: Clock) -> None:
    clock({"onednn": 50.0, "after": 125.0})
    model = mlp().eval()
    before = snapshot(model)
    result = optimize_(model, X)
    assert result.rejected == 3
    assert result.sites[0].reason == "slower: 0.80x [0.80, 0.80]"
    assert snapshot(model) == before


def test_no_gain_end_to_end_reverts_everything(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"onednn": 50.0, "after": 50.0})
    pairs: list[int] = []
    model_pair = measure.model_pair

    def slower(*args: Any, **kwargs: Any) -> Any:
        pairs.append(1)
        pair = model_pair(*args, **kwargs)
        return type(pair)(pair.after, pair.before)

    monkeypatch.setattr(measure, "model_pair", slower)
    model = mlp().eval()
    before = snapshot(model)
    result = optimize_(model, X)
    assert result.rejected == 3
    assert len(pairs) == 3  # one group fewer each time
    assert "slower end to end: 0.50x" in result.sites[0].reason
    assert result.plan.rewrites == ()
    assert snapshot(model) == before


def _wrong(x: Tensor, weight: Tensor, bias: Tensor, activation: str, save_pre: bool) -> Any:
    from fastlinear.ops.linear_act import reference

    y, pre = reference.forward(x, weight, bias, activation, save_pre)
    return y * (1 + 1e-4), pre


def _with_backend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    family = registry.family("linear_act")
    extra = registry.Backend("linear_act", "forward", name, f"{__name__}:_wrong", lambda _: None)
    changed = registry.Family(
        **{
            **vars(family),
            "backends": (*family.backends, extra),
            "prefer": lambda _: (name, "pieces", "eager"),
        }
    )
    monkeypatch.setitem(registry._FAMILIES, "linear_act", changed)


def test_a_wrong_backend_is_rejected_as_less_accurate(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"wrong": 1.0, "after": 1.0})
    _with_backend(monkeypatch, "wrong")
    model = mlp().eval()
    before = snapshot(model)
    result = optimize_(model, X, config=Config(tune=False, families=("linear_act",)))
    assert {s.code for s in result.sites} == {"less_accurate"}
    assert result.rejected == 3
    assert result.sites[0].reason.startswith("less accurate: 0.output")
    assert snapshot(model) == before


def test_a_backend_that_raises_is_an_outcome_not_an_error(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"wrong": 1.0, "after": 1.0})
    _with_backend(monkeypatch, "wrong")

    def fail(*_: Any) -> Any:
        raise RuntimeError("could not create a primitive")

    monkeypatch.setattr(f"{__name__}._wrong", fail)
    registry._load.cache_clear()
    model = mlp().eval()
    before = snapshot(model)
    result = optimize_(model, X, config=Config(tune=False, families=("linear_act",)))
    assert {s.code for s in result.sites} == {"raises"}
    assert "could not create a primitive" in result.sites[0].reason
    monkeypatch.setattr(site_module, "failure", lambda _: None)
    _open_pair(monkeypatch, set())
    result = optimize_(model, X, config=Config(tune=False, families=("linear_act",)))
    assert {s.code for s in result.sites} == {"less_accurate"}
    assert "the rewritten model raises RuntimeError" in result.sites[0].reason
    assert snapshot(model) == before
    registry._load.cache_clear()


def _open_pair(monkeypatch: pytest.MonkeyPatch, fqns: set[str]) -> None:
    """The A/B of these sites ends between 0.9 and 1.3; that of others at 2."""

    def pair(candidate: Any, *_: Any) -> Any:
        us = [100.0] * 5
        after = [111.0, 91.0, 91.0, 91.0, 77.0] if candidate.fqn in fqns else [50.0] * 5
        samples = [Samples(n, tuple(v), "wall", 1, "clock") for n, v in (("b", us), ("a", after))]
        return measure.Pair(*samples), 1

    monkeypatch.setattr(site_module, "pair", pair)


@pytest.mark.parametrize("after", [50.0, 120.0])
def test_open_sites_are_decided_on_the_whole_step(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, after: float
) -> None:
    clock({"onednn": 50.0, "after": 50.0})
    _open_pair(monkeypatch, {"2"})
    model_pair, compared = measure.model_pair, []

    def incremental(*args: Any, **kwargs: Any) -> Any:
        if kwargs["against"].swaps:
            compared.append((len(args[1].swaps), len(kwargs["against"].swaps)))
            clock({"after": after})
        try:
            return model_pair(*args, **kwargs)
        finally:
            clock({"onednn": 50.0, "after": 50.0})

    monkeypatch.setattr(measure, "model_pair", incremental)
    model = mlp().eval()
    result = optimize_(model, X)
    assert compared == [(5, 3)]  # 0, 1, 2, 3, 4 against 0, 1, 4
    if after < 100:
        assert statuses(result) == {"0": "kept", "2": "kept", "4": "kept"}
        assert "open by itself, decided on the whole step: with it" in result.sites[1].reason
        assert "open" not in result.sites[0].reason
    else:
        assert statuses(result) == {"0": "kept", "2": "rejected", "4": "kept"}
        assert "adds 0.83x" in result.sites[1].reason
        assert "forward" not in vars(model[2])
    assert result.verdicts
    assert all(v.passed for v in result.verdicts)


def test_sites_that_are_all_open_stand_on_the_whole_step(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"onednn": 50.0, "after": 50.0})
    _open_pair(monkeypatch, {"0", "2", "4"})
    result = optimize_(mlp().eval(), X)
    assert result.kept == 3
    assert "all kept rewrites together 2.00x" in result.sites[0].reason


def test_a_smaller_set_of_rewrites_is_verified_again(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"onednn": 50.0, "after": 50.0})
    _open_pair(monkeypatch, {"2"})
    model_pair, sets = measure.model_pair, []
    verdicts = verify.Judge.verdicts

    def no_gain(*args: Any, **kwargs: Any) -> Any:
        pair = model_pair(*args, **kwargs)
        return type(pair)(pair.before, pair.before) if kwargs["against"].swaps else pair

    def noted(self: Any, swaps: Any, like: Any = None) -> Any:
        sets.append([s.fqn for s in swaps.swaps])
        return verdicts(self, swaps, like)

    monkeypatch.setattr(measure, "model_pair", no_gain)
    monkeypatch.setattr(verify.Judge, "verdicts", noted)
    assert optimize_(mlp().eval(), X).kept == 2
    assert sets == [["0", "1", "2", "3", "4"], ["0", "1", "4"]]


class TwoShapes(nn.Module):
    """One linear called on inputs of two shapes, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x)) + self.fc(x[:1])


@pytest.mark.usefixtures("fast")
def test_every_shape_seen_is_verified_and_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[int] = []
    tune = measure.tuning.tune

    def noted(problem: Any, **kwargs: Any) -> Any:
        tuned.append(problem.dim("M"))
        return tune(problem, **kwargs)

    monkeypatch.setattr(measure.tuning, "tune", noted)
    model = TwoShapes().eval()
    result = optimize_(model, X)
    (only,) = result.sites
    assert (only.status, only.calls, only.problem["dims"]["M"]) == ("kept", 3, 8)
    assert "all 2 kinds of input seen are verified and measured" in only.reason
    assert tuned == [8, 1]
    assert [t["problem"]["dims"]["M"] for t in result.plan.to_json()["tuned"]] == [8, 1]
    result.revert()

    def wrong_when_single(x: Tensor, *rest: Any) -> Any:
        from fastlinear.ops.linear_act import reference

        y, pre = reference.forward(x, *rest)
        return y * (1 + 1e-4 * (x.shape[0] == 1)), pre

    _with_backend(monkeypatch, "wrong")
    monkeypatch.setattr(f"{__name__}._wrong", wrong_when_single)
    registry._load.cache_clear()
    forced = Config(tune=False, backends={"linear_act": "wrong"})
    (only,) = optimize_(model, X, config=forced).sites
    assert only.code == "less_accurate"
    assert only.reason.startswith("less accurate: fc.output")
    registry._load.cache_clear()


def test_a_small_wrong_gradient_is_not_taken_for_noise() -> None:
    exact = torch.linspace(0.5, 1.5, 64, dtype=torch.float64)
    theirs = exact.to(torch.bfloat16)
    scale = 10 * float(exact.norm())  # far below 64 roundings of bfloat16
    assert verdicts.compare("grad.w", theirs, theirs, exact, scale).passed
    assert not verdicts.compare("grad.w", theirs * 1.05, theirs, exact, scale).passed
    zero = torch.zeros(64, dtype=torch.float64)
    tiny = torch.full((64,), 1e-6, dtype=torch.bfloat16)
    assert verdicts.compare("grad.b", tiny * 5, tiny, zero, scale).passed


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_the_whole_model_is_judged_too(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    clock({"wrong": 1.0, "after": 1.0})
    _with_backend(monkeypatch, "wrong")
    monkeypatch.setattr(site_module, "failure", lambda _: None)
    model = mlp()
    result = optimize_(model, X, config=Config(tune=False, mode=mode, families=("linear_act",)))
    assert result.rejected == 3
    assert "in the whole model" in result.sites[0].reason


@pytest.mark.usefixtures("fast")
def test_a_model_that_raises_is_left_alone() -> None:
    model = Raises()
    before = snapshot(model)
    with pytest.raises(InputError, match=r"optimize_.*LookupError") as caught:
        optimize_(model, X)
    assert isinstance(caught.value.__cause__, LookupError)
    assert snapshot(model) == before


ERRORS: tuple[type[BaseException], ...] = (KeyboardInterrupt, RuntimeError)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("pair", KeyboardInterrupt),
        *((w, e) for w in ("model_pair", "tune_all", "environment") for e in ERRORS),
    ],
)
def test_an_interruption_leaves_the_model_untouched(
    monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise error

    home = {"environment": finish, "pair": site_module}.get(where, measure)
    monkeypatch.setattr(home, where, stop)
    model = mlp()
    before = snapshot(model)
    with pytest.raises(error):
        optimize_(model, X, config=TRAIN)
    assert snapshot(model) == before


@pytest.mark.usefixtures("fast")
def test_a_site_whose_measurement_raises_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(site_module, "pair", full)
    monkeypatch.setattr(site_module, "times", full)
    model = mlp()
    before = snapshot(model)
    result = optimize_(model, X, config=TRAIN)
    assert snapshot(model) == before
    assert any(s.code == "raises" and "out of memory" in s.reason for s in result.sites)


@pytest.mark.usefixtures("fast")
def test_an_interruption_while_rewritten_leaves_the_model_untouched() -> None:
    model = mlp()
    before = snapshot(model)
    hits: list[int] = []

    def loss(output: Tensor) -> Tensor:
        if "forward" in vars(model[0]):
            hits.append(1)
            raise KeyboardInterrupt
        return output.square().sum()

    with pytest.raises(KeyboardInterrupt):
        optimize_(model, X, config=TRAIN, loss_fn=loss)
    assert hits
    assert snapshot(model) == before


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
@pytest.mark.parametrize(("family", "backend"), [("linear_act", "cublaslt"), ("mlp", "graph")])
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
    assert data["summary"] == {"kept": 2, "rejected": 0, "refused": 1, "nothing_to_do": 0}
    assert {s["fqn"]: s["code"] for s in data["sites"]}["2"] == "filtered"
    assert data["step"]["speedup"]["median"] == 2.0
    assert data["profile"]["kind"] == "profile"
    assert len(data["step"]["samples"]["before"]) == 5
    text = result.table()
    assert "filter_fn leaves it out" in text
    assert "2 kept" in text
    assert "2 kept" in str(result)


@pytest.mark.usefixtures("fast")
def test_revert_refuses_to_undo_somebody_elses_change() -> None:
    model = mlp().eval()
    result = optimize_(model, X)
    mine = model[0].forward
    model[0].forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(InputError, match="another forward on 0"):
        result.revert()
    model[0].__dict__["forward"] = mine
    result.revert()
    assert "forward" not in vars(model[0])
