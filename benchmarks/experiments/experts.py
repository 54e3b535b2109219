"""Experts of published models, beside what transformers runs them by:
``python -m benchmarks.experiments.experts --out FILE``.

A layer is transformers' own module with random weights; each of its implementations runs it as it
is, and ours beside them. A row has the median microseconds of each in one interleaved run, forward
or with all gradients, and what errors are. ``eager`` and tokens that choose experts evenly are as
transformers has them; a CUDA graph cannot hold what reads the device.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fastlinear as fl
from benchmarks.harness.case import timed_on
from fastlinear.core.compare import judge
from fastlinear.core.environment import environment
from fastlinear.core.timing import interleave
from fastlinear.fastpath import autograd_node, lookup

OURS = "fastlinear"
WAYS = (OURS, "grouped_mm", "batched_mm", "eager")
COMPILED = "grouped_mm"
_MOST_COPIED = 1 << 33  # bytes that batched_mm's copies of weights may take
Run = Callable[[], Any]


class Model(NamedTuple):
    """Experts of a published model.

    Attributes:
        name: of the model.
        experts, top: how many there are, and how many a token chooses.
        features, hidden: H and I.
    """

    name: str
    experts: int
    top: int
    features: int
    hidden: int


MODELS = (
    Model("Qwen3-30B-A3B", 128, 8, 2048, 768),
    Model("OLMoE-1B-7B", 64, 8, 2048, 1024),
    Model("DeepSeek-V2-Lite", 64, 6, 2048, 1408),
    Model("gpt-oss-20b", 32, 4, 2880, 2880),
    Model("Mixtral-8x7B", 8, 2, 4096, 14336),
)
TOKENS = {"cuda": (1, 32, 512, 4096, 16384), "cpu": (1, 32, 512)}


def layer(model: Model, device: str, dtype: torch.dtype) -> nn.Module:
    """transformers' module of such experts, with random weights."""
    if model.name == "gpt-oss-20b":
        from transformers import GptOssConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        config: Any = GptOssConfig(
            hidden_size=model.features,
            intermediate_size=model.hidden,
            num_local_experts=model.experts,
        )
        kind: Any = GptOssExperts
    else:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config = Qwen3MoeConfig(
            hidden_size=model.features,
            moe_intermediate_size=model.hidden,
            num_experts=model.experts,
        )
        kind = Qwen3MoeExperts
    with torch.device(device):
        made: nn.Module = kind(config).to(dtype)
        for p in made.parameters():
            nn.init.normal_(p, std=model.features**-0.5)
    return made


def ways(
    made: nn.Module, model: Model, x: Tensor, routing: Sequence[Tensor], compiled: bool
) -> dict[str, Callable[[], Tensor]]:
    """Each implementation's forward. Weights are shared."""
    copied = x.shape[0] * model.top * 3 * model.features * model.hidden * x.element_size()
    found: dict[str, Callable[[], Tensor]] = {}
    for name in WAYS:
        if name == "batched_mm" and copied > _MOST_COPIED:
            continue
        own: Any = copy.copy(made)
        own.config = copy.copy(made.config)
        own.config._experts_implementation = name
        found[name] = lambda own=own: own(x, *routing)  # type: ignore[misc]
        if name == COMPILED and compiled:
            run = torch.compile(own)
            found[f"compile, {name}"] = lambda run=run: run(x, *routing)  # type: ignore[misc]
    return found


def with_gradients(forward: Callable[[], Tensor], leaves: Sequence[Tensor], dy: Tensor) -> Run:
    """The forward, and the gradients of the leaves."""
    return lambda: torch.autograd.grad(forward(), leaves, dy)


def row(
    model: Model, tokens: int, device: str, dtype: torch.dtype, compiled: bool, budget_s: float
) -> Iterator[dict[str, Any]]:
    """A model's times and verdicts with so many tokens: forward, and with gradients."""
    torch.manual_seed(0)
    made = layer(model, device, dtype)
    x, dy = (torch.randn(tokens, model.features, device=device, dtype=dtype) for _ in range(2))
    weight, index = torch.randn(tokens, model.experts, device=device).softmax(-1).topk(model.top)
    routing = index, weight.to(dtype)
    runs = ways(made, model, x.requires_grad_(), routing, compiled)
    exact = ways(
        copy.deepcopy(made).double(), model, x.double(), (index, routing[1].double()), False
    )
    with torch.no_grad():
        verdict = judge("y", *(f() for f in (runs[OURS], runs["grouped_mm"], exact["eager"])))
    del exact
    leaves = [x, *made.parameters()]
    for direction in ("forward", "forward and backward"):
        us = {}
        for metric in timed_on(device):
            arms: dict[str, Run] = dict(runs)
            if direction != "forward":
                arms = {name: with_gradients(run, leaves, dy) for name, run in runs.items()}
            if metric == "device":
                del arms["eager"]
            with torch.set_grad_enabled(direction != "forward"):
                found = interleave(arms, device=device, metric=metric, budget_s=budget_s)
            us[metric] = {name: round(s.median_us, 1) for name, s in found.items()}
        failed = [] if verdict.passed else [str(verdict)]
        facts = {**model._asdict(), "tokens": tokens, "dtype": str(dtype).removeprefix("torch.")}
        yield {**facts, "direction": direction, "us": us, "failed": failed}


def main() -> None:
    """Time all models, and write a line of each number of tokens and direction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="rows, JSON lines")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--model", nargs="+", choices=[m.name for m in MODELS])
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--skip-compile", action="store_true", help="it takes long to prepare")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds a direction and metric")
    given = parser.parse_args()
    fl.nn.Experts.register_with_transformers()
    lookup.wait(60.0)
    autograd_node.wait(60.0)
    dtype = getattr(torch, given.dtype)
    with given.out.open("w") as file:
        for model in MODELS:
            if given.model and model.name not in given.model:
                continue
            for tokens in given.tokens or TOKENS[given.device]:
                told = model, tokens, given.device, dtype, not given.skip_compile, given.budget
                for found in row(*told):
                    print(model.name, tokens, found["direction"], found["us"], *found["failed"])
                    file.write(json.dumps({**found, "env": environment(given.device)}) + "\n")
                    file.flush()


if __name__ == "__main__":
    main()
