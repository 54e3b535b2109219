"""What each of two processes sees; ``torch.distributed.run`` starts them, rank 0 prints JSON.

Every process does the same, so a rank that ran another number of steps would hang here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fastlinear as fl
from fastlinear.core.timing import Samples
from fastlinear.dispatch import tune
from fastlinear.profile import clock
from fastlinear.rewrite.evaluate import measure, site

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
CONFIG = {"draws": 1, "optimizer_steps": 1, "time_budget_s": 0.5}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def by_block(model: nn.Module, mesh: Any) -> nn.Module:
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


class Reduced(nn.Module):
    """Communicates in a forward of plain modules, as hand-written tensor parallelism does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        total = y.detach().clone()
        dist.all_reduce(total)
        return y + total


WRAPPED: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "DDP": lambda m, _: DistributedDataParallel(m),
    "replicate": lambda m, mesh: replicate(m, device_mesh=mesh),
    "FSDP1": lambda m, _: FullyShardedDataParallel(m, device_id=torch.device("cpu")),
    "FSDP2": by_block,
    "tensor parallel": tensor_parallel,
    "all_reduce": lambda m, _: Reduced(m),
}


def said(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:  # noqa: BLE001  any of them is what is asked for
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def refusals(mesh: Any) -> dict[str, Any]:
    """What every entry raises for every wrapper, and whether the model is as good afterwards."""
    found: dict[str, Any] = {}
    for name, wrap in WRAPPED.items():
        model = wrap(make(), mesh)
        with torch.no_grad():  # leaves the root of FSDP2 unsharded
            before = model(X).clone()
        entries = {
            f"{entry} {mode}": run
            for mode in ("inference", "train")
            for entry, run in {
                "optimize_": lambda m=model, mode=mode: fl.optimize_(
                    m, X, config=fl.Config(mode=mode, **CONFIG)
                ),
                "profile": lambda m=model, mode=mode: fl.profile(m, X, mode=mode),
            }.items()
        }
        if name != "all_reduce":  # which only a run shows; no plan is loaded before
            entries["apply_"] = lambda m=model: fl.apply_(m, {}, X)
        texts = {entry: said(run) for entry, run in entries.items()}
        with torch.no_grad():
            same = torch.equal(model(X), before)
        model(X).square().mean().backward()
        found[name] = {"texts": texts, "same": same}
    return found


def faster(contenders: dict[str, Callable[[], Any]], **_: Any) -> dict[str, Samples]:
    """A clock by which every rewrite takes half the time."""
    times = {name: 50.0 if name in ("after", "onednn") else 100.0 for name in contenders}
    for run in contenders.values():
        run()
    return {n: Samples(n, (us,) * 5, "wall", 1, "clock") for n, us in times.items()}


def wrapped_afterwards(mesh: Any) -> dict[str, Any]:
    """How far a model that was optimized first is from the plain one, after a step each."""
    plan = None
    found: dict[str, Any] = {}
    for module in (clock, measure, site, tune):
        module.interleave = faster  # type: ignore[attr-defined]
    for name in ("DDP", "FSDP2"):
        plain, model = make(), make()
        config = fl.Config(mode="train", backends={"linear_act": "onednn"}, **CONFIG)
        if plan is None:
            result = fl.optimize_(model, X, config=config)
            plan = result.plan.to_json()
        else:
            result = fl.apply_(model, plan, X)
        model = WRAPPED[name](model, mesh)
        for m in (plain, model):
            optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
            m(X).square().mean().backward()
            optimizer.step()
        found[name] = {"kept": result.kept, "off": float((model(X) - plain(X)).abs().max())}
    return found


def mlp_layers(mesh: Any) -> dict[str, float]:
    """The same of ``fl.nn.MLP`` whose layers are sharded by torch's own functions."""
    found = {}
    for name, wrap in {"tensor parallel": tensor_parallel, "FSDP2": by_layer}.items():
        torch.manual_seed(0)
        net = fl.nn.MLP([16, 32, 16], activation="gelu")
        plain = net.to_sequential()
        expected = plain(X)
        plain_loss = expected.square().mean()
        plain_loss.backward()
        grad = plain[0].weight.grad.clone()
        for p in plain.parameters():
            p.grad = None
        net = wrap(net, mesh)
        y = net(X)
        y.square().mean().backward()
        got = net.get_submodule("0").weight.grad.full_tensor()
        found[name] = max(float((y - expected).abs().max()), float((got - grad).abs().max()))
    return found


def by_layer(net: nn.Module, mesh: Any) -> nn.Module:
    for layer in net.children():
        fully_shard(layer, mesh=mesh)
    return net


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    parts = (refusals, wrapped_afterwards, mlp_layers)
    told = {part.__name__: part(mesh) for part in parts}
    dist.barrier()
    if dist.get_rank() == 0:
        json.dump(told, sys.stdout)
        sys.stdout.flush()
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo's that outlives the interpreter may abort the process


if __name__ == "__main__":
    main()
