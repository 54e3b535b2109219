"""Models that do unusual things: nothing of the user's is lost, and nothing passes unverified."""

from __future__ import annotations

import copy
from collections import Counter
from random import uniform
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastlinear.core.compare import Verdict
from fastlinear.core.errors import InputError
from fastlinear.core.settings import Config
from fastlinear.rewrite import apply_, optimize_
from fastlinear.rewrite.verify import model as verify
from fastlinear.rewrite.verify.inputs import Call, from_specs, input_specs
from tests.rewrite.rewrite_models import Clock, mlp, run, snapshot

pytestmark = [
    pytest.mark.usefixtures("fast"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
TRAIN = Config(mode="train", draws=2, optimizer_steps=2)


class WritesInput(nn.Module):
    """Scales its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return self.fc(x)


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_inputs_that_a_model_writes_to_stay_the_users(mode: str) -> None:
    x = X.clone()
    model = WritesInput()
    result = optimize_(model, x, config=Config(mode=mode, draws=2, optimizer_steps=2))
    assert torch.equal(x, X)
    assert result.kept == 1
    plan = result.plan.to_json()
    result.revert()
    assert apply_(model, plan, x).kept == 1
    assert torch.equal(x, X)


class Wrapped:
    """An output of a class of the user's own."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.itself = self


class ReturnsObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        return Wrapped(self.fc(x))


class ReturnsNothing(ReturnsObject):
    def forward(self, x: Tensor) -> Any:
        return str(self.fc(x).shape)


def test_outputs_in_objects_are_verified() -> None:
    result = optimize_(ReturnsObject().eval(), X)
    assert [v.name for v in result.verdicts] == ["random numbers drawn", "output[0]"]


def test_an_output_without_tensors_is_an_error() -> None:
    model = ReturnsNothing().eval()
    with pytest.raises(InputError, match="at least one tensor"):
        optimize_(model, X)


def test_a_frozen_model_in_train_mode() -> None:
    model = mlp().requires_grad_(False)
    result = optimize_(model, X.clone().requires_grad_(), config=TRAIN)
    assert result.kept == 3
    assert "grad.input[0]" in {v.name for v in result.verdicts}


class Tracker:
    """Keeps a number, as a logger of metrics does."""

    def __init__(self) -> None:
        self.calls = 0

    def update(self, _: Any) -> None:
        self.calls += 1


TRACKER = Tracker()


class Tracked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        TRACKER.update(y)
        return y


def test_a_forward_that_calls_a_global_object_keeps_calling_it() -> None:
    model = Tracked().eval()
    result = optimize_(model, X)
    before = TRACKER.calls
    run(model, X)
    assert TRACKER.calls == before + 1
    assert "TRACKER" in result.sites[0].reason


class Checkpointed(nn.Module):
    """Saves memory in training by running a part twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.part = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.runs = Counter[str]()
        self.part.register_forward_pre_hook(lambda *_: self.runs.update(["part"]))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        return checkpoint(self.part, y, use_reentrant=False)


def test_checkpointing_is_not_traced_away() -> None:
    model = Checkpointed()
    optimize_(model, X, config=TRAIN)
    model.runs.clear()
    model(X).sum().backward()
    assert model.runs["part"] == 2


track = TRACKER.update


class TrackedByMethod(Tracked):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        track(y)
        return y


class SometimesSkips(Tracked):
    """Python's own random numbers decide."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        return y if uniform(0.0, 1.0) < 2.0 else x


@pytest.mark.parametrize("kind", [TrackedByMethod, SometimesSkips])
def test_bound_methods_among_globals_are_objects_too(kind: type[nn.Module]) -> None:
    model = kind().eval()
    result = optimize_(model, X)
    assert result.sites[0].route != "parent"
    assert "which cannot be watched" in result.sites[0].reason


class ReachesInto(nn.Module):
    """Runs a linear of its Sequential alone on a path that no run has shown."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        nn.init.zeros_(self.net[0].bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def extra(self, x: Tensor) -> Tensor:
        return x


class Indexes(ReachesInto):
    def extra(self, x: Tensor) -> Tensor:
        return self.net[0](x)


class Loops(ReachesInto):
    def extra(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x)
            x = x - 1
        return x


class Renames(ReachesInto):
    @property
    def first(self) -> Any:
        net = self.net
        return net[0]

    def extra(self, x: Tensor) -> Tensor:
        return self.first(x)


@pytest.mark.parametrize("kind", [ReachesInto, Indexes, Loops, Renames])
def test_a_sequential_that_code_reaches_into_keeps_its_parts(kind: type[ReachesInto]) -> None:
    model = kind().eval()
    reference = copy.deepcopy(model)
    (only,) = optimize_(model, X).sites
    assert (only.status, only.route, only.activation) == ("kept", "parent", "relu")
    with torch.no_grad():
        torch.testing.assert_close(model(X), reference(X))
        torch.testing.assert_close(model.extra(X), reference.extra(X))


def helper(y: Tensor) -> Tensor:
    return y + 1


class Helped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return helper(F.relu(self.fc(x)))


def test_a_helper_replaced_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Helped().eval()
    assert optimize_(model, X).sites[0].route == "parent"
    y = run(model, X)
    monkeypatch.setattr(f"{__name__}.helper", lambda y: y + 2)
    torch.testing.assert_close(run(model, X), y + 1)
    monkeypatch.undo()
    monkeypatch.setattr(F, "relu", torch.sigmoid)
    assert run(model, X).max() <= 2


@pytest.mark.parametrize("value", [nn.Linear(2, 2), [1, 2], {"a": 1}])
def test_a_global_with_the_name_of_an_attribute_is_another_thing(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "fc", value)  # as in a notebook
    model = Helped().eval()
    result = optimize_(model, X)
    assert result.sites[0].route == "parent"
    monkeypatch.setitem(globals(), "fc", 1)
    assert torch.equal(run(model, X), helper(F.relu(F.linear(X, model.fc.weight, model.fc.bias))))


class HasScripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scripted(F.relu(self.fc(x)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_scripted_parts_are_left_alone(mode: str) -> None:
    config = Config(mode=mode, draws=2, optimizer_steps=2)
    model = HasScripted()
    before = run(model, X)
    result = optimize_(model, X, config=config)
    assert {s.fqn: s.code for s in result.sites}["scripted.0"] == "scripted"
    assert torch.allclose(run(model, X), before, atol=1e-6)
    result.revert()
    in_sequential = nn.Sequential(nn.Linear(16, 16), torch.jit.script(nn.ReLU()), nn.Linear(16, 16))
    assert optimize_(in_sequential, X, config=config).kept == 2


def test_a_weight_that_is_a_buffer() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
    weight = model[0].weight.detach()
    del model[0].weight
    model[0].register_buffer("weight", weight)
    for mode in ("inference", "train"):
        result = optimize_(model, X, config=Config(mode=mode, draws=2, optimizer_steps=2))
        assert result.kept == 1, result.sites[0].reason
        result.revert()


def test_specs_of_inputs_with_infinities_give_finite_inputs() -> None:
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    specs = input_specs(Call((mask, torch.full((2,), torch.nan)), {}))
    made = from_specs(specs, torch.device("cpu"), 0)
    assert all(bool(torch.isfinite(t).all()) for t in made.args)


def test_apply_counts_sites_as_optimize_does() -> None:
    model = mlp().eval()
    model.spare = nn.Linear(3, 3)  # type: ignore[assignment]
    model.forward = lambda x: nn.Sequential(*list(model)[:5])(x)  # type: ignore[method-assign]
    result = optimize_(model, X)
    plan = result.plan.to_json()
    result.revert()
    again = apply_(model, plan, X)
    assert again.summary() == result.summary()
    assert {s.fqn: s.code for s in again.sites}["spare"] == "not_called"


def test_verification_that_wavers_gives_up_instead_of_failing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([False, True, False])
    monkeypatch.setattr(
        verify.Judge,
        "verdicts",
        lambda *_, **__: [Verdict("output[0]", 0.0 if next(answers, False) else 1.0, 0.0, 0.5)],
    )
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
    before = snapshot(model)
    result = optimize_(model, X)
    assert {s.code for s in result.sites} == {"less_accurate"}
    assert snapshot(model) == before


class CannotBeCopied(nn.Sequential):
    def __deepcopy__(self, memo: Any) -> Any:
        raise KeyError("no copies")


def test_a_model_that_cannot_be_copied() -> None:
    model = CannotBeCopied(nn.Linear(16, 16), nn.ReLU())
    result = optimize_(model, X, config=TRAIN)
    assert result.kept == 1
    assert any("skipped optimizer steps (KeyError: 'no copies')" in n for n in result.notes)


class SecondStepRaises(nn.Module):
    """Runs only on the weights it was made with."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.total = float(self.fc.weight.detach().sum())

    def forward(self, x: Tensor) -> Tensor:
        if abs(float(self.fc.weight.detach().sum()) - self.total) > 1e-4:
            raise RuntimeError("other weights")
        return self.fc(x)


def test_optimizer_steps_that_the_model_refuses_are_noted() -> None:
    result = optimize_(SecondStepRaises(), X, config=TRAIN)
    assert result.kept == 1
    assert any("optimizer steps" in n and "other weights" in n for n in result.notes)


class SparseInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ self.fc(x)


def test_sparse_inputs_are_kept_as_they_are() -> None:
    adjacency = torch.eye(8).to_sparse()
    model = SparseInput().eval()
    result = optimize_(model, (X, adjacency), config=Config(draws=2))
    assert result.kept == 1
    assert not any("skipped" in n for n in result.notes)
    plan = result.plan.to_json()
    result.revert()
    with pytest.raises(InputError, match="Pass inputs"):
        apply_(model, plan)
    assert apply_(model, plan, (X, adjacency)).kept == 1


class ComplexOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.fc(x))


def test_complex_outputs_are_compared_by_size() -> None:
    assert optimize_(ComplexOutput().eval(), X, config=Config(draws=2)).kept == 1


def test_deep_copies_of_a_guarded_parent_notice_their_own_changes(clock: Clock) -> None:
    model = Helped().eval()
    optimize_(model, X)
    twin = copy.deepcopy(model)
    twin.fc.register_forward_hook(lambda *_: torch.zeros(8, 16))
    assert torch.equal(run(twin, X), torch.ones(8, 16))
    assert not torch.equal(run(model, X), torch.ones(8, 16))
