"""The whole of ``profile`` on small models, and that it leaves no trace."""

from __future__ import annotations

import copy
import html
import json
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.profile.capture import loss_of, profile
from fastlinear.profile.records import Finding
from fastlinear.profile.report import ProfileReport
from fastlinear.report import page

X = torch.randn(16, 32)


def mlp():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


@pytest.fixture
def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=128, n_head=4, vocab_size=100, n_positions=64, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2Model(config)


TOKENS = torch.randint(0, 100, (4, 64), generator=torch.Generator().manual_seed(0))


def strays(report: ProfileReport) -> set[str]:
    """Operations charged neither to a module nor to a known part of the step around it.

    Shares of time are no measure here: the engine waits longer while other programs use the cores.
    """
    known = {"(autograd engine)", "(loss)", "(loss, backward)", "(step)", "aten::ones_like"}
    return {name for name, _ in report.unattributed} - known


def test_mlp_report():
    report = profile(mlp(), X, steps=1)
    assert report.model_class == "Sequential"
    assert (report.mode, report.device) == ("inference", "cpu")
    assert report.step_us > 0
    assert not strays(report)
    names = {(r.fqn, r.op) for r in report.records}
    assert {("0", "aten::linear"), ("1", "aten::relu"), ("2", "aten::linear")} <= names
    assert {r.direction for r in report.records} == {"forward"}
    assert all(r.calls == 1 for r in report.records)
    total = sum(r.cpu_us for r in report.records) + sum(us for _, us in report.unattributed)
    assert total == pytest.approx(report.step_us, rel=0.01)
    found = [f for f in report.findings if f.code == "linear_activation"]
    assert [f.fqn for f in found] == ["0"]


def test_training_attributes_the_backward_as_well():
    report = profile(mlp(), X, "train", steps=1)
    ops = {(r.fqn, r.op, r.direction) for r in report.records}
    assert ("0", "AddmmBackward0", "backward") in ops
    assert ("1", "ReluBackward0", "backward") in ops
    assert ("2", "AccumulateGrad", "backward") in ops


def test_floors_count_only_gradients_that_are_computed():
    model = mlp()
    model[2].requires_grad_(False)
    first, last = profile(model, X, "train", steps=1).sites
    assert (first.input_grad, first.weight_grad) == (False, True)
    assert (last.input_grad, last.weight_grad) == (True, False)
    first, last = profile(model, X, steps=1).sites
    assert not any(s.input_grad or s.weight_grad for s in (first, last))


def test_a_functions_backward_is_charged_to_its_linear():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(32, 64)

        def forward(self, x):
            return F.leaky_relu(self.fc(x))

    (finding,) = (
        f for f in profile(Parent(), X, "train", steps=1).findings if f.code == "linear_activation"
    )
    assert finding.details["how"] == "function"
    assert finding.details["activation_forward_us"] > 0
    assert finding.details["activation_backward_us"] > 0


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_gpt2_is_attributed_to_qualified_names(gpt2, mode):
    report = profile(gpt2, {"input_ids": TOKENS, "use_cache": False}, mode)
    assert not strays(report)
    times = {r.fqn: r for r in report.records}
    assert "h.1.mlp.c_fc" in times
    assert times["h.1.mlp.c_fc"].module_class == "Conv1D"
    sites = {s.fqn: s for s in report.sites}
    assert len(sites) == 8
    assert {s.kind for s in sites.values()} == {"conv1d"}
    site = sites["h.1.mlp.c_fc"]
    assert (site.in_features, site.out_features) == (128, 512)
    assert (site.activation, site.activation_fqn) == ("gelu_tanh", "h.1.mlp.act")
    assert site.how == "modules"
    assert sites["h.1.attn.c_attn"].code == "no_activation"
    fused = {f.fqn for f in report.findings if f.code == "linear_activation"}
    assert fused == {f"h.{i}.mlp.c_fc" for i in range(2)}


def test_bert_and_vit_sites():
    t = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = t.BertModel(t.BertConfig(**small, intermediate_size=64, vocab_size=100))
    report = profile(bert, (TOKENS[:2, :8],), steps=1)
    active = {s.fqn: s.activation for s in report.sites if s.code == "ok"}
    assert active == {"encoder.layer.0.intermediate.dense": "gelu", "pooler.dense": "tanh"}
    vit = t.ViTModel(t.ViTConfig(**small, intermediate_size=64, image_size=32, patch_size=16))
    report = profile(vit, {"pixel_values": torch.randn(1, 3, 32, 32)}, steps=1)
    assert sorted(s.activation for s in report.sites if s.code == "ok") == ["gelu", "tanh"]


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("name", ["bert", "vit"])
def test_encoders_are_attributed(name, mode):
    t = pytest.importorskip("transformers")
    small = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "bert":
        model = t.BertModel(t.BertConfig(**small, intermediate_size=1024, vocab_size=100))
        inputs = {"input_ids": TOKENS}
    else:
        model = t.ViTModel(t.ViTConfig(**small, intermediate_size=1024, image_size=64))
        inputs = {"pixel_values": torch.randn(8, 3, 64, 64)}
    report = profile(model, inputs, mode)
    assert not strays(report)
    directions = {"forward"} if mode == "inference" else {"forward", "backward"}
    layers = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for direction in directions:
        assert layers <= {r.fqn for r in report.records if r.direction == direction}


def test_a_healthy_linear_yields_nothing():
    for model in (nn.Linear(32, 64), nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64))):
        for _ in range(3):  # what else the machine does may take a part of one measurement
            report = profile(model, X, steps=1)
            found = [f for f in report.findings if f.code != "launch_bound"]
            if not found:
                break
        assert found == []


# ---------------------------------------------------------------------------------------------
# Nothing is left behind


class Stateful(nn.Module):
    """Everything a step can change: statistics, counters, randomness, gradients."""

    def __init__(self, raises=0):
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.register_buffer("total", torch.zeros(()), persistent=False)
        self.calls, self.raises = 0, raises

    def forward(self, x):
        self.calls += 1
        self.total = self.total + 1  # replaces the buffer
        self.fc.weight.data.mul_(0.5)  # changes a parameter behind autograd's back
        self.cache = x
        random.random()
        np.random.rand()
        if self.calls == self.raises:
            raise ValueError("no more")
        return self.drop(F.relu(self.norm(self.fc(x))))


def picture(model):
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "ids": [id(t) for t in (*model.parameters(), *model.buffers())],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "attributes": [sorted(m.__dict__) for m in model.modules()],
        "hooks": [
            [len(v) for k, v in m.__dict__.items() if k.endswith("hooks")] for m in model.modules()
        ],
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1]),
        "other": (model.calls, float(model.total)),
    }


def assert_same(a, b):
    assert a["state"].keys() == b["state"].keys()
    for key, value in a["state"].items():
        assert torch.equal(value, b["state"][key]), key
    for x, y in zip(a["grads"], b["grads"], strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)
    for key in ("ids", "training", "attributes", "hooks", "other"):
        assert a[key] == b[key], key
    assert torch.equal(a["random"][0], b["random"][0])
    assert a["random"][1] == b["random"][1]
    assert np.array_equal(a["random"][2], b["random"][2])
    assert not torch.nn.modules.module._has_any_global_hook()


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("raises", [0, 1, 4])
def test_the_model_is_as_before(mode, training, raises):
    model = Stateful(raises).train(training)
    model.norm.eval()
    model.fc.weight.grad = torch.ones(8, 32)
    x = X.clone().requires_grad_()
    before = picture(model)
    if raises:
        with pytest.raises(InputError, match="no more") as caught:
            profile(model, x, mode, steps=1)
        assert type(caught.value.__cause__) is ValueError
        # Only the very first call tells bad inputs; later ones are the model's own affair.
        assert ("forward accepts" in str(caught.value)) == (raises == 1)
    else:
        profile(model, x, mode, steps=1)
    assert_same(before, picture(model))
    assert x.grad is None


def test_inputs_a_model_writes_to_are_copied():
    class Writes(nn.Module):
        def forward(self, x):
            return x.add_(1)

    x = torch.zeros(3, 4).t()
    profile(Writes(), x, steps=1)
    assert torch.equal(x, torch.zeros(4, 3))


# ---------------------------------------------------------------------------------------------
# Arguments


def test_default_loss():
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    assert loss_of(x) == 5
    assert loss_of({"a": x, "b": [x * 2, None, torch.ones(2)]}) == 25
    assert loss_of({"loss": x.sum(), "logits": x}) == 4
    half = x.to(torch.bfloat16)
    assert loss_of((half,)).dtype is torch.float32
    with pytest.raises(InputError, match="has a gradient"):
        loss_of(x.detach())


def test_the_given_loss_is_used_and_checked():
    seen = []
    profile(mlp(), X, "train", steps=1, loss_fn=lambda y: seen.append(1) or y.sum())
    assert seen
    with pytest.raises(InputError, match="one differentiable number"):
        profile(mlp(), X, "train", loss_fn=lambda y: y)


def made_for_inference():
    with torch.inference_mode():
        return nn.Sequential(nn.Linear(32, 8))


@pytest.mark.parametrize(
    ("model", "kwargs", "error", "text"),
    [
        (mlp(), {"mode": "eval"}, InputError, "mode in inference, train"),
        (mlp(), {"steps": 0}, InputError, "steps of at least 1"),
        (3, {}, InputError, "nn.Module"),
        (nn.Sequential(nn.LazyLinear(3)), {}, InputError, "lazy"),
        (made_for_inference(), {}, InputError, "'0.weight', made under torch.inference_mode"),
        (nn.Linear(32, 8, device="meta"), {}, InputError, "meta device"),
        (nn.Linear(31, 8), {}, InputError, "RuntimeError: mat1 and mat2"),
    ],
)
def test_bad_arguments(model, kwargs, error, text):
    with pytest.raises(error, match=text):
        profile(model, X, **kwargs)


def test_compiled_and_scripted_models_are_refused():
    with pytest.raises(UnsupportedError, match=r"torch\.compile"):
        profile(torch.compile(mlp()), X)
    scripted = torch.jit.trace(mlp(), X)
    with pytest.raises(UnsupportedError, match="scripted"):
        profile(scripted, X)


@pytest.mark.parametrize("how", ["function", "method"])
def test_compiled_parts_are_charged_to_their_caller(how):
    model = mlp()
    if how == "function":
        model[0] = torch.compile(model[0], backend="eager", fullgraph=True)
    else:
        model[0].compile(backend="eager")
    keys = [tuple(vars(m)) for m in model.modules()]
    report = profile(model, X)
    assert not strays(report)
    inner = {s.fqn: s for s in report.sites}["0._orig_mod" if how == "function" else "0"]
    assert (inner.code, inner.calls) == ("not_called", 0)
    assert {s.code for s in report.sites if s is not inner} <= {"ok", "no_activation"}
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert [tuple(vars(m)) for m in model.modules()] == keys


def test_a_profiler_that_is_already_on_is_refused():
    with torch.profiler.profile(), pytest.raises(UnsupportedError, match="profiler"):
        profile(mlp(), X)


# ---------------------------------------------------------------------------------------------
# The report as data and text


def test_json_and_table():
    seen = []
    report = profile(mlp(), X, steps=1, progress=lambda *a: seen.append(a))
    assert seen[0][1] == 0
    assert seen[-1][1] == seen[-1][2]
    data = json.loads(json.dumps(report.to_json()))
    assert (data["kind"], data["format"]) == ("profile", 1)
    assert data["sites"][0]["shapes"] == [[16, 32]]
    assert {"environment", "mode", "device", "step_us", "attributed", "unattributed"} <= set(data)
    assert "Linear, then relu" in report.table()
    assert "\x1b" not in report.table()


def test_a_small_training_step_says_what_is_outside_of_modules():
    def slow_loss(y):
        end = time.perf_counter() + 0.002
        while time.perf_counter() < end:
            pass
        return y.sum()

    report = profile(mlp(), X, "train", loss_fn=slow_loss, steps=1)
    assert report.attributed < 0.95
    (note,) = report.notes
    assert note.startswith(f"only {report.attributed:.1%} of the step falls inside modules; ")
    assert f"largest rest is (loss), {report.unattributed[0][1]:.1f} µs (the loss function" in note
    assert report.to_json()["notes"] == [note]
    told = " ".join(report.table().split())
    assert told.index(note) < told.index("Slowest modules")
    assert f"<b>Note:</b> {note}." in html.unescape(page(report.to_json()))


@pytest.mark.parametrize("rows", [8, 64])
def test_what_a_tiny_training_step_spends_outside_of_modules_has_a_name(rows):
    report = profile(mlp(), torch.randn(rows, X.shape[-1]), "train", steps=3)
    names = [name for name, _ in report.unattributed]
    assert {"(autograd engine)", "(loss)", "(loss, backward)"} <= set(names)
    assert not [name for name in names if "Backward0" in name or name == "aten::mean"]
    assert not strays(report)
    (note,) = report.notes
    assert note.endswith(f"outside of the model; {report.named:.1%} of the step has a name")


def test_the_share_with_a_name_counts_modules_and_known_parts():
    rest = (("(loss)", 6.0), ("(autograd engine)", 2.0), ("aten::to", 2.0))
    report = ProfileReport("Net", "train", "cpu", 50.0, 1.0, (), (), (), 0.8, rest)
    assert report.named == pytest.approx(0.96)
    assert replace(report, unattributed=()).named == pytest.approx(0.8)


def test_a_rest_without_a_name_is_said_as_well():
    few = ProfileReport("Net", "inference", "cuda:0", 1.0, 1.0, (), (), (), 0.9, ())
    assert few.notes == (
        "only 90.0% of the kernel time falls inside modules; nothing names the rest",
    )
    assert replace(few, attributed=0.95).notes == ()
    one = replace(few, unattributed=(("aten::to", 3.0),))
    assert one.notes[0].endswith("the largest rest is aten::to, 3.0 µs")


def test_what_no_module_holds_is_told_before_everything_else():
    finding = Finding("slow_dims", "0", "Slow dimensions", "", 3.0, 1.0, 2.0, 1e6, 1e6, "memory")
    rest = (("aten::to", 6.0), ("(loss)", 2.0), *((f"op{i}", 1.0) for i in range(4)))
    report = ProfileReport("Net", "train", "cpu", 100.0, 1.0, (), (), (finding,), 0.88, rest)
    told = " ".join(report.table().split())
    text = (
        "Unattributed: 12.0% of the step, 12.0 µs outside of all modules: aten::to 6.0, "
        "(loss) 2.0, op0 1.0, op1 1.0, op2 1.0 and 1 more (µs per step)"
    )
    assert told.count("Unattributed") == 1
    assert told.index(text) < told.index("note:") < told.index("Slowest modules")
    assert told.index("Slowest modules") < told.index("Findings")
    shown = html.unescape(page(report.to_json()))
    assert shown.index("Without a module, 12") < shown.index("What was found")
    assert (
        "Unattributed: 0.0% of the step\n"
        in replace(report, attributed=1.0, unattributed=()).table()
    )
    device = replace(report, device="cuda:0", attributed=0.5, unattributed=())
    assert "Unattributed: 50.0% of the kernel time; nothing names it" in device.table()


def test_html(tmp_path):
    path = profile(mlp(), X, steps=1).html(tmp_path / "profile.html")
    text = path.read_text()
    assert "<html" in text
    assert "Linear, then relu" in text


def test_table_says_when_there_is_nothing():
    empty = ProfileReport("Linear", "inference", "cpu", 1.0, 1.0, (), (), (), 1.0, ())
    assert "nothing to do" in empty.table()
    many = tuple(Finding("slow_dims", f"m{i}", "t", "m", 1, 1, 1, 1, 1, "memory") for i in range(3))
    full = copy.copy(empty)
    object.__setattr__(full, "findings", many)
    assert "1 more findings" in full.table(rows=2)
    assert "flops" in full.table(width=80)
    narrow = full.table(width=50)
    assert "flops" not in narrow
    assert max(map(len, narrow.splitlines())) <= 50
    assert "m0: t. m" in narrow  # the advice of the largest of each kind
    assert "m1: t. m" not in narrow


def test_torchs_newer_precision_setting_does_not_stop_a_profile() -> None:
    product = torch.backends.cuda.matmul
    before = product.fp32_precision
    legacy = torch.get_float32_matmul_precision()
    product.fp32_precision = "tf32"
    try:
        report = profile(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(8, 64))
        assert product.fp32_precision == "tf32"
    finally:
        product.fp32_precision = before
        torch.set_float32_matmul_precision(legacy)
    assert report.sites
