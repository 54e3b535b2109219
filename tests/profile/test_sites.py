"""Which Linear-shaped modules are found, and what is said to follow them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastlinear as fl
from fastlinear.profile.observe import observe
from fastlinear.profile.sites import find_sites


def sites_of(model, *args, **kwargs):
    calls = Counter()

    def forward():
        with torch.no_grad():
            model(*args, **kwargs)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda m, a: calls.update([m]))
    forward()
    hook.remove()
    found = find_sites(model, observe(model, forward), calls)
    return {s.fqn: s for s in found.sites}


X = torch.randn(4, 6, 8)


def linear(k=8, n=8, **kwargs):
    return nn.Linear(k, n, **kwargs)


def one(body, *names, **parts):
    """A module with Linears of the given names, other parts, and ``body`` as its forward."""

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            for name in names:
                setattr(self, name, linear())
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, x, flag=True, *, scale=None):
            return body(self, x)

    return Parent()


def test_sequential():
    model = nn.Sequential(linear(8, 16), nn.ReLU(), linear(16, 4, bias=False))
    sites = sites_of(model, X)
    first, last = sites["0"], sites["2"]
    assert (first.how, first.activation, first.activation_fqn) == ("modules", "relu", "1")
    assert (first.code, first.parent_fqn, first.calls, first.flags) == ("ok", "", 1, ())
    assert (first.in_features, first.out_features, first.bias) == (8, 16, True)
    assert (first.shapes, first.rows, first.x_layouts) == (((4, 6, 8),), 24, ("rows",))
    assert (first.dtype, first.device, first.kind) == ("float32", "cpu", "linear")
    assert (last.how, last.activation, last.code) == ("none", None, "no_activation")
    assert not last.bias


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("relu", lambda s, x: F.relu(s.fc(x))),
        ("relu", lambda s, x: s.fc(x).relu()),
        ("relu", lambda s, x: torch.relu(s.fc(x))),
        ("gelu", lambda s, x: F.gelu(s.fc(x))),
        ("gelu_tanh", lambda s, x: F.gelu(s.fc(x), approximate="tanh")),
        ("silu", lambda s, x: s.stored(s.fc(x))),
        ("tanh", lambda s, x: s.fc(x).tanh()),
        ("sigmoid", lambda s, x: s.fc(x).sigmoid()),
        ("leaky_relu", lambda s, x: F.leaky_relu(s.fc(x))),
        ("relu", lambda s, x: F.relu(s.fc(x), inplace=True)),
    ],
)
def test_functions_in_the_parents_forward(name, body):
    model = nn.Sequential(one(body, "fc"))
    model[0].stored = F.silu
    site = sites_of(model, X)["0.fc"]
    assert (site.how, site.activation, site.activation_fqn) == ("function", name, None)
    assert (site.code, site.parent_fqn) == ("ok", "0")


@pytest.mark.parametrize(
    ("code", "body"),
    [
        ("several_users", lambda s, x: F.relu(h := s.fc(x)) + h),
        ("no_activation", lambda s, x: F.relu(s.drop(s.fc(x)))),
        ("no_activation", lambda s, x: F.leaky_relu(s.fc(x), 0.2)),
        ("no_activation", lambda s, x: s.fc(x) + F.relu(x)),
        ("no_activation", lambda s, x: F.relu(s.fc(x) * 2)),
        ("untraceable", lambda s, x: F.relu(s.fc(x)) if x.sum() < 1e9 else x),
        ("several_users", lambda s, x: F.relu(h := s.fc(x)) + h if x.sum() < 1e9 else x),
        ("not_called", lambda s, x: F.relu(F.linear(x, s.fc.weight))),
        ("not_called", lambda s, x: x),
        ("mixed_use", lambda s, x: F.gelu(s.fc(F.relu(s.fc(x))))),
        ("mixed_use", lambda s, x: s.fc(F.relu(s.fc(x)))),
    ],
)
def test_what_cannot_be_fused_says_why(code, body):
    site = sites_of(one(body, "fc", drop=nn.Dropout(0.1)), X)["fc"]
    assert (site.code, site.how, site.activation) == (code, "none", None)
    assert site.reason.endswith(".")
    if code == "untraceable":
        assert "relu follows" in site.reason


def test_a_reader_that_this_run_did_not_take_still_counts():
    """The graph is asked besides the run: a second reader of the output is fatal."""

    def body(self, x):
        h = self.fc(x)
        if not isinstance(h, torch.Tensor):
            self.extra = h.mean()
        return F.relu(h)

    model = one(body, "fc")
    assert sites_of(model, X)["fc"].code == "several_users"
    assert not hasattr(model, "extra")


def test_arguments_that_are_no_tensors_keep_their_values():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.act = linear(), nn.GELU()

        def forward(self, x, options=None, *, activate=False):
            h = self.fc(x)
            if activate:
                h = self.act(h)
            return {"h": h, "options": options}

    assert sites_of(Parent(), X, activate=True)["fc"].activation == "gelu"
    assert sites_of(Parent(), X, {"a": 1})["fc"].code == "no_activation"


def test_layers_in_a_list_belong_to_the_module_that_calls_them():
    model = one(
        lambda s, x: F.relu(s.layers[1](F.relu(s.layers[0](x)))),
        layers=nn.ModuleList([linear(), linear()]),
    )
    sites = sites_of(model, X)
    assert {s.parent_fqn for s in sites.values()} == {""}
    assert [s.activation for s in sites.values()] == ["relu", "relu"]


def test_a_shared_activation_module_is_flagged():
    act = nn.ReLU()
    sites = sites_of(nn.Sequential(linear(), act, linear(), act, linear(), nn.ReLU()), X)
    assert sites["0"].flags == sites["2"].flags == ("shared_activation",)
    assert {sites["0"].activation_fqn, sites["2"].activation_fqn} == {"1"}
    assert sites["4"].flags == ()


def test_a_reused_linear():
    layer = linear()
    act = nn.ReLU()
    sites = sites_of(nn.Sequential(layer, act, layer, act), X)
    assert list(sites) == ["0"]
    site = sites["0"]
    assert (site.calls, site.code, site.activation, site.rows) == (2, "ok", "relu", 48)
    assert "several_names" in site.flags
    other = sites_of(nn.Sequential(layer, nn.ReLU(), layer, nn.GELU()), X)["0"]
    assert (other.code, other.how) == ("mixed_use", "none")


def test_flags():
    class Mine(nn.Linear):
        pass

    hooked, patched, tied = linear(), linear(), linear()
    hooked.register_forward_hook(lambda m, a, y: y)
    patched.forward = lambda x: F.linear(x, patched.weight, patched.bias)
    tied.weight = patched.weight
    wrapped = nn.utils.parametrizations.orthogonal(linear())
    model = nn.Sequential(Mine(8, 8), hooked, patched, tied, wrapped, fl.nn.Linear(8, 8))
    flags = {name: set(s.flags) for name, s in sites_of(model, X).items()}
    assert flags["0"] == {"subclass"}
    assert flags["1"] == {"hooks"}
    assert flags["2"] == {"shared_weight", "patched_forward"}
    assert flags["3"] == {"shared_weight"}
    assert flags["4"] >= {"subclass", "parametrized"}
    assert flags["5"] == {"subclass"}


def test_activation_flags():
    act = nn.ReLU(inplace=True)
    act.register_forward_hook(lambda m, a, y: None)
    site = sites_of(nn.Sequential(linear(), act), X)["0"]
    assert site.flags == ("activation_hooks", "activation_inplace")


def test_a_layer_with_its_activation_inside_has_nothing_to_do():
    model = nn.Sequential(fl.nn.Linear(8, 8, activation="relu"), nn.ReLU())
    assert sites_of(model, X)["0"].code == "already_fused"


def test_layouts_and_shapes_of_every_call():
    model = one(lambda s, x: s.fc(x) + s.fc(x[:2]).sum() + s.fc(x.transpose(0, 1)).sum(), "fc")
    site = sites_of(model, X)["fc"]
    assert site.calls == 3
    assert site.shapes == ((4, 6, 8), (2, 6, 8), (6, 4, 8))
    strided = sites_of(nn.Sequential(linear()), torch.randn(8, 5).t())["0"]
    assert strided.x_layouts == ("strided",)


def test_fast_paths_that_skip_the_module_are_told():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    assert {s.code for s in sites_of(layer, X).values()} == {"not_called"}


def test_observation_leaves_no_hooks_when_the_forward_raises():
    def body(self, x):
        raise KeyError("x")

    model = one(body, "fc")
    with pytest.raises(KeyError):
        observe(model, lambda: model(X))
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called
