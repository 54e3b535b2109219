"""How each contender computes the forward of a stack of linear layers.

Single layers are called as functions; deeper stacks as ``nn.Sequential``, which is how models hold
them. Each contender may lay out the weights as it likes; that is done before the clock starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.work import Forward, Stack, Unit, Work, chain, plain
from fastlinear import nn as fl_nn
from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.linear.op import linear_act


def graphed(work: Work, unit: Unit) -> Unit:
    """Replay a CUDA graph of the unit, one graph a set; results lie in the graph's own memory.

    The unit is kept: a graph knows addresses only, and the unit may own tensors it reads.
    """
    graphs, results = [], []
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), work.mode():
        for i in range(len(work.stacks)):
            unit(i)
            unit(i)
            torch.cuda.synchronize()
            # the plain calls: torch.cuda.graph empties the allocator's cache at every capture
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            try:
                results.append(unit(i))
            finally:
                graph.capture_end()
            graphs.append(graph)
    torch.cuda.current_stream().wait_stream(stream)

    def run(i: int, kept: Unit = unit) -> tuple[Tensor, ...]:
        graphs[i].replay()
        return results[i]

    return run


class _Act(nn.Module):
    """An activation torch has no module for."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.value = activation_of(name).value

    def forward(self, pre: Tensor) -> Tensor:
        return self.value(pre)


_MODULES: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


class _WithSkips(nn.Module):
    """Layers, some of which take the input before what the layer below gives."""

    def __init__(self, layers: list[nn.Module], skips: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        h, linears = x, 0
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                h = torch.cat((x, h), -1) if linears in self.skips else h
                linears += 1
            h = layer(h)
        return h


def model(stack: Stack) -> nn.Module:
    """The stack as models hold it, over these very parameters."""
    plain = sequential(stack)
    return _WithSkips(list(plain), stack.skips) if stack.skips else plain


def sequential(stack: Stack) -> nn.Sequential:
    """The same of a stack in which no layer takes the input again."""
    layers: list[nn.Module] = []
    for weight, bias, name in zip(stack.weights, stack.biases, stack.activations, strict=True):
        layers.append(_holding(nn.Linear, weight, bias))
        if name != "none":
            make = _MODULES.get(name)
            layers.append(make() if make else _Act(name))
    return nn.Sequential(*layers)


def _holding(kind: Any, weight: Tensor, bias: Tensor | None, **options: Any) -> nn.Module:
    """A linear layer that holds these very parameters."""
    n, k = weight.shape
    layer: nn.Module = kind(k, n, bias=bias is not None, device="meta", **options)
    layer.weight = weight
    if bias is not None:
        layer.bias = bias
    return layer


def _by_model(work: Work, make: Callable[[Stack], Callable[[Tensor], Tensor]]) -> Forward:
    models = [make(s) for s in work.stacks]
    return lambda stack: models[stack.index](stack.x)


def eager(work: Work) -> Forward:
    return plain if work.case.dim("L") == 1 else _by_model(work, model)


def eager_kn(work: Work) -> Forward:
    """Plain PyTorch with the weights stored (K, N)."""

    def turned(weight: Tensor) -> nn.Parameter:
        return nn.Parameter(weight.detach().t().contiguous().t(), requires_grad=False)

    stacks = [replace(s, weights=tuple(map(turned, s.weights))) for s in work.stacks]
    if work.case.dim("L") == 1:
        return lambda stack: plain(stacks[stack.index])
    models = [model(s) for s in stacks]
    return lambda stack: models[stack.index](stack.x)


def compiled(work: Work, **how: Any) -> Forward:
    """One set: the compiled module. Rotating sets: one compiled function over all of them."""
    if len(work.stacks) == 1:
        return _by_model(work, lambda s: torch.compile(model(s), dynamic=False, **how))
    run = torch.compile(chain, dynamic=False, fullgraph=True, **how)
    return lambda s: run(s.x, s.weights, s.biases, s.activations, s.skips)


def max_autotune(work: Work) -> Forward:
    if work.case.device == "cpu" and not work.case.needs_grad:
        # on a CPU Inductor tunes and packs weights only when they are frozen into the graph
        return compiled(work, options={"max_autotune": True, "freezing": True})
    return compiled(work, mode="max-autotune-no-cudagraphs")


def reduce_overhead(work: Work) -> Forward:
    run = _by_model(work, lambda s: torch.compile(model(s), dynamic=False, mode="reduce-overhead"))

    def forward(stack: Stack) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return run(stack)

    return forward


def cublaslt(stack: Stack) -> Tensor:
    y = stack.x
    use_gelu = stack.activation == "gelu_tanh"
    for weight, bias in zip(stack.weights, stack.biases, strict=True):
        y = torch.ops.aten._addmm_activation(bias, y, weight.t(), use_gelu=use_gelu)
    return y


POST_OPS: dict[str, tuple[str, str]] = {
    "none": ("none", ""),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}


def onednn(work: Work, *, pack: bool) -> Forward:
    name, algorithm = POST_OPS[work.case.option("activation")]
    run = torch.ops.mkldnn._linear_pointwise
    weights = [tuple(w.detach() for w in s.weights) for s in work.stacks]
    if pack:
        m = work.case.dim("M")
        reorder = torch.ops.mkldnn._reorder_linear_weight
        weights = [tuple(reorder(w, m) for w in ws) for ws in weights]

    def forward(stack: Stack) -> Tensor:
        y = stack.x
        for weight, bias in zip(weights[stack.index], stack.biases, strict=True):
            y = run(y, weight, bias, name, [], algorithm)
        return y

    return forward


def ours(work: Work, backend: str | None) -> Forward:
    """linear_act; deeper stacks as ``nn.Linear`` modules of fastlinear, each layer on its own."""
    if work.case.dim("L") == 1:

        def forward(stack: Stack) -> Tensor:
            return linear_act(
                stack.x,
                stack.weights[0],
                stack.biases[0],
                activation=stack.activation,
                backend=backend,
            )

        return forward

    def model(stack: Stack) -> nn.Sequential:
        return nn.Sequential(
            *(
                _holding(fl_nn.Linear, w, b, activation=stack.activation, backend=backend)
                for w, b in zip(stack.weights, stack.biases, strict=True)
            )
        )

    return _by_model(work, model)


def ours_as_chain(work: Work) -> Forward:
    """The whole stack as ``fastlinear.nn.MLP``, which is what ``optimize_`` makes of it."""
    return _by_model(work, lambda s: fl_nn.MLP.from_sequential(sequential(s)))
