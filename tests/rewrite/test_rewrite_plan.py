"""Plans: written, read back, applied again, and refused when they do not fit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.errors import InputError, PlanError, UnsupportedError
from fastlinear.core.settings import Config
from fastlinear.dispatch import backend as registry
from fastlinear.dispatch import cache
from fastlinear.rewrite import apply_, fits, optimize_, remember
from fastlinear.rewrite import plan as plans
from tests.rewrite.rewrite_models import Clock, Functional, mlp, run, snapshot

pytestmark = [
    pytest.mark.usefixtures("fast"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def make_plan(model: nn.Module, **config: Any) -> dict[str, Any]:
    result = optimize_(model, X, config=Config(**config))
    result.revert()
    data: dict[str, Any] = json.loads(json.dumps(result.plan.to_json()))
    return data


@pytest.mark.parametrize("make", [mlp, Functional])
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_roundtrip(make: Any, mode: str, tmp_path: Path) -> None:
    model = make()
    result = optimize_(model, X, config=Config(mode=mode, draws=2, optimizer_steps=2))
    path = result.save(tmp_path / "plan.json")
    expected = run(model, X) if mode == "inference" else None
    other = make()
    other.load_state_dict(model.state_dict())
    cache.forget()
    again = apply_(other, path)
    assert again.kept == result.kept > 0
    assert again.plan.rewrites == result.plan.rewrites
    assert {v.name for v in again.verdicts} == {v.name for v in result.verdicts}
    if expected is not None:
        assert torch.equal(run(other.eval(), X), run(model.eval(), X))
    again.revert()
    assert all("forward" not in vars(m) for m in other.modules())


def test_a_plan_brings_its_choices_to_an_empty_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp().eval()
    plan = make_plan(model)
    monkeypatch.setenv("FASTLINEAR_CACHE_DIR", str(tmp_path / "other"))
    cache.forget()
    assert apply_(model, plan).sites[0].backends == {"forward": "onednn"}


def cached(folder: Path) -> list[Path]:
    return list(folder.glob("*.json"))


def test_a_plans_choices_are_written_only_once_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    model = mlp().eval()
    plan = make_plan(model)
    monkeypatch.setenv("FASTLINEAR_CACHE_DIR", str(tmp_path))
    cache.forget()
    with pytest.raises(InputError):
        apply_(model, plan, torch.randn(3, 5))
    clock({"after": 150.0})
    assert apply_(model, plan).rejected == 3
    assert cached(tmp_path) == []
    clock({"after": 50.0})
    assert apply_(model, plan).kept == 3
    assert len(cached(tmp_path)) == 1


def test_the_users_own_choices_count_while_a_plan_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp().eval()
    plan = make_plan(model)
    monkeypatch.setenv("FASTLINEAR_CACHE_DIR", str(tmp_path))
    cache.forget()
    mine = edited(plan, lambda p: [t.update(best="eager") for t in p["tuned"]])
    for decision in remember.decisions_of(plans.load(mine)):
        decision.store()
    assert {tuple(s.backends.items()) for s in apply_(model, plan).sites} == {
        (("forward", "eager"),)
    }


def test_a_plan_that_is_sure_counts_more_than_an_own_choice_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp().eval()
    plan = make_plan(model)
    assert {t["doubt"] for t in plan["tuned"]} == {""}
    monkeypatch.setenv("FASTLINEAR_CACHE_DIR", str(tmp_path))
    cache.forget()
    change = {"best": "eager", "doubt": "within noise onednn may be 9% faster"}
    mine = edited(plan, lambda p: [t.update(change) for t in p["tuned"]])
    for decision in remember.decisions_of(plans.load(mine)):
        decision.store()
    assert remember.decisions_of(plans.load(mine)) == []
    result = apply_(model, plan)
    assert result.sites[0].backends == {"forward": "onednn"}
    assert {e["doubt"] for e in cache.entries("cpu").values()} == {""}


def test_other_backends_than_planned_are_said_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    model = mlp().eval()
    plan = make_plan(model)
    result = apply_(model, plan)
    assert {s.code for s in result.sites} == {"in_plan"}
    assert not any("than planned" in note for note in result.notes)
    result.revert()
    monkeypatch.setenv("FASTLINEAR_CACHE_DIR", str(tmp_path))
    cache.forget()
    mine = edited(plan, lambda p: [t.update(best="eager") for t in p["tuned"]])
    for decision in remember.decisions_of(plans.load(mine)):
        decision.store()
    result = apply_(model, plan)
    assert {s.code for s in result.sites} == {"other_backend"}
    assert "forward by eager, not onednn: no other was faster" in result.sites[0].reason
    assert "2.00x [2.00, 2.00] end to end" in result.sites[0].reason
    told = " ".join(result.table().split())
    assert "note: other backends than planned for" in told
    assert "of 3 rewrites (0" in told
    result.revert()
    clock({"after": 150.0})
    assert "slower (forward by eager, not onednn" in apply_(model, plan).sites[0].reason


def test_a_planned_backend_that_cannot_serve_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp().eval()
    plan = make_plan(model)
    layers = registry.family("linear_act")
    unable = tuple(
        replace(b, reason_not=lambda _: "It is switched off.") if b.name == "onednn" else b
        for b in layers.backends
    )
    monkeypatch.setitem(registry._FAMILIES, "linear_act", replace(layers, backends=unable))
    gone = edited(plan, _set("rewrites", 2, "backends", "forward", value="abacus"))
    (first, second) = (n for n in apply_(model, gone).notes if "than planned" in n)
    assert "for 2 of 3 rewrites (0, 2)" in first
    assert ", not onednn: It is switched off." in first
    assert "for 1 of 3 rewrites (4)" in second
    assert ", not abacus: there is no such backend" in second


def edited(plan: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    plan = copy.deepcopy(plan)
    change(plan)
    return plan


def _set(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(plan: dict[str, Any]) -> None:
        item: Any = plan
        for key in keys[:-1]:
            item = item[key]
        item[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_set("kind", value="bench"), "kind='bench'"),
        (_set("format", value=99), "format 99"),
        (_set("rewrites", 0, "fqn", value="7.fc"), "named '7.fc'"),
        (_set("rewrites", 0, "fqn", value="1"), "'1' to be rewritten"),
        (_set("rewrites", 0, "activation", value="silu"), "silu"),
        (_set("rewrites", 0, "activation", value="swoosh"), "bad or missing field"),
        (_set("rewrites", 0, "route", value="global"), "bad or missing field"),
        (_set("rewrites", 0, "extra", value=1), "bad or missing field"),
        (_set("rewrites", value=3), "bad or missing field"),
        (_set("mode", value="fast"), "bad or missing field"),
        (_set("inputs", value=None), "bad or missing field"),
        (_set("rewrites", 0, "parent_fqn", value=[]), "bad or missing field"),
        (_set("rewrites", 0, "activation_fqn", value=7), "bad or missing field"),
        (_set("inputs", "args", value="x"), "complete description of the inputs"),
        (_set("inputs", "args", 0, value=None), "complete description of the inputs"),
        (_set("inputs", "args", 0, "tensor", value="load"), "load is no dtype"),
        (_set("inputs", "args", 0, "tensor", value="float3"), "complete description of the inputs"),
        (_set("inputs", "args", 0, "shape", value=[-1]), "negative dimension"),
        (_set("inputs", "args", 0, "shape", value=None), "complete description of the inputs"),
        (_set("inputs", "args", 0, "std", value=None), "complete description of the inputs"),
        (_set("tuned", 0, "problem", "dims", "M", value=float("inf")), "complete measurements"),
        (_set("model", "class", value="Net"), "class Net, which the plan was made for; received o"),
        (_set("model", value=None), "'model' is not an object"),
        (_set("environment", value=[]), "'environment' is not an object"),
        (_set("environment", "flags", value=None), "'flags' is not an object"),
        (_set("environment", "device", value="cpu"), "'device' is not an object"),
        (_set("environment", "torch", value=2), "'torch' is not a text"),
        (_set("tuned", value=None), "'tuned' is not an array"),
        (_set("rewrites", value=["0"]), "a rewrite is a text"),
        (_set("rewrites", 0, "backends", value=["onednn"]), "bad or missing field"),
        (_set("rewrites", 0, "backends", value={"forward": 1}), "bad or missing field"),
        (_set("rewrites", 0, "problem", value=1), "bad or missing field"),
        (_set("rewrites", 0, "backend", value=1), "bad or missing field"),
        (
            _set("rewrites", 0, "backend", value="warp"),
            "a backend of linear_act in .*eager.*'warp'",
        ),
        (lambda plan: plan["rewrites"].append(plan["rewrites"][0]), "unknown rewrite of '0'"),
        (lambda plan: plan.pop("mode"), "bad or missing field .no 'mode'."),
        (_set("model", "fingerprint", value="0" * 16), "fingerprint 0000"),
        (_set("environment", "torch", value="1.0"), "torch 1.0"),
        (_set("environment", "device", "kind", value="cuda"), "device cuda"),
        (_set("environment", "device", "slug", value="abacus"), "device abacus"),
        (_set("environment", "threads", value=64), "threads 64"),
        (_set("environment", "flags", "float32_matmul_precision", value="low"), "precision low"),
        (_set("fastlinear", value="0.0.0"), "fastlinear 0.0.0"),
        (_set("tuned", 0, "times_us", value=3), "complete measurements"),
        (_set("tuned", 0, "best", value="nope"), "complete measurements .*'nope'"),
        (_set("tuned", 0, "problem", "dims", "M", value="x"), "complete measurements"),
        (_set("rewrites", 0, "problem", "dims", "M", value="x"), "bad or missing field"),
        (_set("inputs", "args", 0, "mean", value=float("nan")), "mean nan"),
        (_set("inputs", "args", 0, "std", value=-1.0), "std -1.0"),
        (_set("tuned", 0, "problem", value={}), "complete measurements"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], None], text: str
) -> None:
    model = mlp().eval()
    plan = make_plan(model)
    before = snapshot(model)
    with pytest.raises(PlanError, match=text):
        apply_(model, edited(plan, change))
    assert snapshot(model) == before


def test_plans_of_this_version_and_of_earlier_ones_apply() -> None:
    assert fl.__version__ in fits._APPLIED
    model = mlp().eval()
    plan = make_plan(model)

    def older(data: dict[str, Any]) -> None:
        data["fastlinear"] = "0.1.0"
        data["tuned"][0]["times_us"]["onednn_packed"] = 1.0  # a backend that is no more
        data["tuned"][0]["best"] = "onednn_packed"

    result = apply_(model, edited(plan, older))
    assert result.kept == len(plan["rewrites"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "plan.json: an empty file. The file is corrupt"),
        (b"{", "plan.json: Expecting property name"),
        (b"\xff\xfe", "can't decode byte 0xff"),
        (b"[" * 100_000, "maximum recursion depth"),
        (b"[]", "received an array. Write one with result.save"),
        (b'"plan"', "received a text. "),
        (b"null", "received null. "),
        (b"1.5", "received a number. "),
        (b"{}", "received kind=None. "),
    ],
)
def test_a_corrupt_file_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        apply_(mlp(), path)
    assert str(caught.value).startswith("apply_: expected ")
    assert said in str(caught.value)
    with pytest.raises(PlanError, match="readable"):
        apply_(mlp(), tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (_set("environment", "torch", value="1.0"), "or install that version."),
        (_set("environment", "threads", value=64), "or call torch.set_num_threads(64) first."),
        (
            _set("environment", "flags", "float32_matmul_precision", value="low"),
            "or call torch.set_float32_matmul_precision('low') first.",
        ),
        (_set("environment", "device", "slug", value="x"), "or move the model to such a device."),
    ],
)
def test_another_environment_is_told_with_the_way_out(
    change: Callable[[dict[str, Any]], None], remedy: str
) -> None:
    model = mlp().eval()
    with pytest.raises(PlanError, match="as where the plan was made; received") as caught:
        apply_(model, edited(make_plan(model), change))
    assert caught.value.remedy.endswith(f"make a new plan with optimize_ here, {remedy}")


def test_a_forced_backend_that_cannot_serve_here_is_told() -> None:
    model = mlp().eval()
    plan = edited(make_plan(model), _set("rewrites", 0, "backend", value="cublaslt"))
    before = snapshot(model)
    with pytest.raises(UnsupportedError, match="apply_: expected backend 'cublaslt', which the pl"):
        apply_(model, plan)
    assert snapshot(model) == before


def test_another_model_is_refused() -> None:
    plan = make_plan(mlp().eval())
    with pytest.raises(PlanError, match="fingerprint"):
        apply_(nn.Sequential(*list(mlp())[:4], nn.Linear(32, 5)).eval(), plan)
    hooked = mlp().eval()
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.raises(PlanError, match="forward hook"):
        apply_(hooked, plan)


def test_inputs_can_be_given_and_must_fit() -> None:
    model = mlp().eval()
    plan = make_plan(model)
    assert apply_(model, plan, torch.randn(3, 16)).kept == 3
    with pytest.raises(InputError, match="apply_"):
        apply_(mlp().eval(), plan, torch.randn(3, 5))


def test_a_plan_that_makes_it_slower_is_put_back(clock: Clock) -> None:
    model = mlp().eval()
    plan = make_plan(model)
    clock({"after": 150.0})
    before = snapshot(model)
    result = apply_(model, plan)
    assert result.rejected == 3
    assert "slower: 0.67x" in result.sites[0].reason
    assert snapshot(model) == before


def test_an_interruption_leaves_the_model_untouched() -> None:
    model = mlp()
    plan = make_plan(model, mode="train", draws=1, optimizer_steps=1)
    before = snapshot(model)

    def loss(output: Tensor) -> Tensor:
        if "forward" in vars(model):
            raise KeyboardInterrupt
        return output.square().sum()

    with pytest.raises(KeyboardInterrupt):
        apply_(model, plan, loss_fn=loss)
    assert snapshot(model) == before


def test_specs_rebuild_inputs_of_every_kind() -> None:
    from fastlinear.rewrite.verify.inputs import Call, from_specs, input_specs

    call = Call(
        (torch.arange(6).view(2, 3), [torch.ones(2), None], "text"),
        {"mask": torch.ones(2, dtype=torch.bool), "flag": True, "pair": (torch.zeros(1), 3)},
    )
    specs = json.loads(json.dumps(input_specs(call)))
    again = from_specs(specs, torch.device("cpu"), 0)
    shapes = [getattr(leaf, "shape", leaf) for leaf in call.leaves()]
    assert [getattr(leaf, "shape", leaf) for leaf in again.leaves()] == shapes
    assert again.args[0].dtype is torch.int64
    assert int(again.args[0].max()) <= 5
    assert again.kwargs["mask"].all()
    with pytest.raises(InputError, match="object"):
        from_specs(input_specs(Call((object(),), {})), torch.device("cpu"), 0)


def test_a_plan_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            plans.write_json(path, {"a": 1})
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["plan.json"]
    path.unlink()
    (tmp_path / "other").write_text("")
    plans.write_json(path, {"a": 1})
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode  # readable as any file
