"""optimize_: sites that are slower, wrong or open, and models that raise or are interrupted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastlinear.core.errors import InputError
from fastlinear.core.settings import Config
from fastlinear.core.timing import Samples
from fastlinear.dispatch import backend as registry
from fastlinear.dispatch import confidence, tune
from fastlinear.profile.capture import profile
from fastlinear.rewrite import finish, optimize_
from fastlinear.rewrite.evaluate import measure
from fastlinear.rewrite.evaluate import site as site_module
from fastlinear.rewrite.verify import model as verify
from fastlinear.rewrite.verify import verdicts
from tests.rewrite.rewrite_models import Clock, Raises, mlp, snapshot, statuses

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
TRAIN = Config(mode="train", draws=2, optimizer_steps=2)


def test_eager_best_is_nothing_to_do(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "doubt_of", lambda *_: "")
    clock({"onednn": 200.0})
    model = mlp().eval()
    result = optimize_(model, X)
    assert result.nothing_to_do == 3
    assert {s.code for s in result.sites} == {"eager_is_best"}
    assert "is the fastest backend" in result.sites[0].reason
    assert "forward" not in vars(model[0])


def test_a_doubt_of_what_tuning_found_is_told(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"onednn": 200.0})
    monkeypatch.setattr(tune, "doubt_of", lambda *_: "the machine was busy")
    result = optimize_(mlp().eval(), X)
    assert result.undecided == 3
    assert {s.code for s in result.sites} == {"undecided"}
    (line,) = (note for note in result.notes if "undecided" in note)
    assert line.startswith("3 sites are undecided, because the machine was disturbed (load ")
    assert "run again when nothing else runs" in line
    told = "Dispatch takes PyTorch's own path; the measurement is in doubt: the machine was busy."
    assert {s.reason for s in result.sites} == {told}
    left = [note for note in result.notes if note.startswith("chain ")]
    assert left
    assert all("in doubt: the machine was busy" in note for note in left)


@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_a_comparison_that_scatters_leaves_the_site_undecided(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, spread: float
) -> None:
    clock({"onednn": 50.0})
    after = [100.0 * (1.01 + k * spread / 4) for k in (-2, -1, 0, 1, 2)]
    samples = [
        Samples(n, tuple(us), "wall", 1, "clock") for n, us in (("b", [100.0] * 5), ("a", after))
    ]
    monkeypatch.setattr(site_module, "pair", lambda *_: (measure.Pair(*samples), 1))
    result = optimize_(mlp().eval(), X, config=Config(families=("linear_act",)))
    expected = "undecided" if spread > 0.1 else "rejected"
    assert {s.status for s in result.sites} == {expected}
    assert ("in doubt: within noise" in result.sites[0].reason) == (spread > 0.1)


@pytest.mark.parametrize("load", [0.0, 99.0])
def test_a_busy_machine_leaves_the_whole_step_undecided(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, load: float
) -> None:
    clock({"onednn": 50.0, "after": 50.0})
    monkeypatch.setattr(tune, "doubt_of", lambda *_: "")
    monkeypatch.setattr(confidence, "load_average", lambda: load)
    times = [(100.0, 96.0), (100.0, 98.0), (100.0, 101.0), (100.0, 103.0), (100.0, 104.0)]
    pair = measure.Pair(
        *(
            Samples(n, tuple(us), "wall", 1, "clock")
            for n, us in zip("ba", zip(*times, strict=True), strict=True)
        )
    )
    monkeypatch.setattr(measure, "model_pair", lambda *_, **__: pair)
    model = mlp().eval()
    before = snapshot(model)
    result = optimize_(model, X, config=Config(families=("linear_act",)))
    assert {s.status for s in result.sites} == {"undecided" if load else "rejected"}
    assert any("load 99.0" in note for note in result.notes) == bool(load)
    assert snapshot(model) == before


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
    from fastlinear.families.linear import reference

    y, pre = reference.forward(x, weight, bias, activation, save_pre)
    return y * (1 + 1e-4), pre


def _with_backend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    family = registry.family("linear_act")
    extra = registry.Backend("linear_act", "forward", name, f"{__name__}:_wrong", lambda _: None)
    others = sorted(family.backends, key=lambda b: b.name != "pieces")
    changed = replace(family, backends=(extra, *others), cpu_work=None)
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
    assert compared == [(2, 2)]  # the Sequential with 0 and 2, and 4, against it with 0, and 4
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

    def noted(self: Any, swaps: Any, like: Any = None, **named: Any) -> Any:
        sets.append([s.fqn for s in swaps.swaps])
        return verdicts(self, swaps, like, **named)

    monkeypatch.setattr(measure, "model_pair", no_gain)
    monkeypatch.setattr(verify.Judge, "verdicts", noted)
    assert optimize_(mlp().eval(), X).kept == 2
    assert sets == [["4", ""], ["4", ""]]


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
        from fastlinear.families.linear import reference

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
        if "forward" in vars(model):
            hits.append(1)
            raise KeyboardInterrupt
        return output.square().sum()

    with pytest.raises(KeyboardInterrupt):
        optimize_(model, X, config=TRAIN, loss_fn=loss)
    assert hits
    assert snapshot(model) == before


def test_linears_that_a_kernel_of_pytorchs_takes_unless_watched(clock: Clock) -> None:
    """An encoder layer in inference calls its linears only where they have hooks."""
    clock({"onednn": 50.0})
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu").eval()
    x = torch.randn(2, 4, 16)
    result = optimize_(layer, x)
    assert {s.fqn: s.code for s in result.sites} == dict.fromkeys(
        ("self_attn.out_proj", "linear1", "linear2"), "not_called"
    )
    assert {s.fqn: s.calls for s in profile(layer, x).sites} == dict.fromkeys(
        ("self_attn.out_proj", "linear1", "linear2"), 0
    )
    trained = {s.fqn: s.calls for s in profile(layer.train(), x, "train").sites}
    assert trained == {"self_attn.out_proj": 0, "linear1": 1, "linear2": 1}
