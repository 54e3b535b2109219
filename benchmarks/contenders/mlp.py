"""The contenders of experiments ``overhead`` and ``mlps``: a chain, from the caller's side in.

``eager`` is the chain as models hold it. ``hand_loop`` removes what surrounds its kernels: no
modules, buffers allocated ahead, bias inside the product, ReLU in place; with gradients no autograd
either. ``fastlinear[layerwise]`` fuses the activation as well. Networks whose last layer has no
activation are left to eager mode and ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contenders import forwards as by
from benchmarks.contenders.dispatched import chosen_pieces, tune_pieces
from benchmarks.contenders.linear_act import no_cublaslt, no_onednn
from benchmarks.harness.case import Case
from benchmarks.harness.peer import (
    OURS,
    RECORDED,
    Peer,
    cuda_only,
    no_compiler,
    no_reduce_overhead,
)
from benchmarks.harness.work import (
    Forward,
    Stack,
    Unit,
    Work,
    final_of,
    skips_of,
    widths_of,
)
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.dispatch.backend import Backend, family
from fastlinear.families.mlp import backends
from fastlinear.families.mlp.op import mlp
from fastlinear.families.mlp.parts import parts
from fastlinear.families.mlp.selection import choices_of, tuning_order

_TRITON = ("whole_triton",)  # Triton keeps kernels on disk; ours in CUDA C++ are not kept


def peers(case: Case) -> tuple[Peer, ...]:
    """All contenders of a case, able to take part or not."""
    forced = family(backends.NAME).candidates("forward", on_request=True)
    forced = tuple(b for b in forced if b.name not in ("eager", BATCH_INVARIANT))
    wall, cuda = ("wall",), case.device == "cuda"
    network = "a network's last layer has no activation" if case.option("final") else None

    def uniform(reason_not: Callable[[Case], str | None] = lambda _: None) -> Any:
        return lambda case: network or reason_not(case)

    return (
        Peer("eager", lambda w: w.unit(_eager(w))),
        Peer(
            "hand_loop",
            lambda w: _hand_step(w) if case.needs_grad else w.unit(_hand_loop(w)),
            uniform(),
        ),
        Peer("compile", lambda w: w.unit(by.compiled(w)), no_compiler, precompile=True),
        Peer(
            "compile_reduce_overhead",
            lambda w: w.unit(by.reduce_overhead(w)),
            no_reduce_overhead,
            wall,
            precompile=True,
        ),
        Peer(
            "compile_max_autotune",
            lambda w: w.unit(by.max_autotune(w)),
            no_compiler,
            precompile=True,
            tunes=True,
        ),
        Peer("cuda_graph", lambda w: by.graphed(w, w.unit(_eager(w))), cuda_only, wall),
        Peer("cublaslt", lambda w: w.unit(by.cublaslt), uniform(no_cublaslt)),
        Peer(
            "cublaslt_cuda_graph",
            lambda w: by.graphed(w, w.unit(by.cublaslt)),
            uniform(no_cublaslt),
            wall,
        ),
        Peer("onednn", lambda w: w.unit(by.onednn(w, pack=False)), uniform(no_onednn)),
        Peer("onednn_prepacked", lambda w: w.unit(by.onednn(w, pack=True)), uniform(no_onednn)),
        Peer(OURS, lambda w: w.unit(_ours(None))),
        Peer(
            RECORDED,
            lambda w: by.graphed(w, w.unit(_ours(None))),
            cuda_only,
            wall,
        ),
        *(_forced(b, cuda and b.name in _TRITON) for b in forced),
    )


def problems_of(case: Case) -> list[Problem]:
    """The Problems dispatch sees for the forward of a case, one a part of the chain."""
    widths, skips, final = widths_of(case), skips_of(case), final_of(case)
    names = (*(case.option("activation"),) * (len(widths) - 2), final)
    found = []
    for begin, end in parts(names, skips):
        taken = widths[begin] + (widths[0] if begin in skips else 0)
        found.append(
            backends.problem(
                "forward",
                case.dim("M"),
                (taken, *widths[begin + 1 : end + 1]),
                dtype=case.dtype,
                device=case.device,
                activation=names[begin],
                final_activation=names[end - 1],
                bias="no" if case.option("bias") == "no" else "yes",
                needs_grad=case.needs_grad,
                precision=matmul_precision(FLOAT_DTYPES[case.dtype]),
            )
        )
    return found


def problem_of(case: Case) -> Problem:
    """The one Problem of a chain that runs as a whole."""
    (found,) = problems_of(case)
    return found


def chosen(case: Case, work: Work, captured: bool) -> dict[str, str]:
    """What dispatch takes for a case, in a CUDA graph or not."""
    each = [chosen_pieces(choices_of, p, captured) for p in problems_of(case)]
    return {piece: ", ".join(one[piece] for one in each if piece in one) for piece in each[0]}


def tune(case: Case, device: torch.device) -> None:
    """Tune every piece and the layers it may be made of, on a GPU inside CUDA graphs as well."""
    for p in problems_of(case):
        tune_pieces(tuning_order, p, device)


def _forced(backend: Backend, precompile: bool) -> Peer:
    def reason_not(case: Case) -> str | None:
        reasons = (backend.reason_not(p) for p in problems_of(case))
        return next((reason for reason in reasons if reason is not None), None)

    name = f"{OURS}[{backend.name}]"
    return Peer(name, lambda w: w.unit(_ours(backend.name)), reason_not, precompile=precompile)


# --------------------------------------------------------------------------------------------
# How each computes it


def _ours(backend: str | None) -> Forward:
    def forward(stack: Stack) -> Tensor:
        return mlp(
            stack.x,
            stack.weights,
            stack.biases,
            activation=stack.activation,
            final_activation=stack.final,
            skips=stack.skips,
            backend=backend,
        )

    return forward


def _eager(work: Work) -> Forward:
    """``nn.Sequential`` of Linear and ReLU in place, as the experiment's model has it."""
    models = [by.model(s) for s in work.stacks]
    for model in models:
        for layer in model.modules():
            if isinstance(layer, nn.ReLU):
                layer.inplace = True
    return lambda stack: models[stack.index](stack.x)


def _hand_loop(work: Work) -> Forward:
    """Products into buffers allocated ahead, ReLU in place; the last buffer is the result."""
    planned = []
    for stack in work.stacks:
        turned = [w.t() for w in stack.weights]
        outputs = [stack.x.new_empty(len(stack.x), len(w)) for w in stack.weights]
        planned.append(list(zip(turned, stack.biases, outputs, strict=True)))

    def forward(stack: Stack) -> Tensor:
        h = stack.x
        for weight, bias, out in planned[stack.index]:
            if bias is None:
                torch.mm(h, weight, out=out)
            else:
                torch.addmm(bias, h, weight, out=out)
            h = torch.relu_(out)
        return h

    return forward


def _hand_step(work: Work) -> Unit:
    """The same with the backward: every product and mask into a buffer allocated ahead."""
    steps = [_HandStep(stack) for stack in work.stacks]
    return lambda i: steps[i]()


class _HandStep:
    """Forward and backward of one stack without autograd; results lie in buffers of its own."""

    def __init__(self, stack: Stack) -> None:
        self.x, self.dy = stack.x.detach(), stack.dy
        self.weights = [w.detach() for w in stack.weights]
        self.biases = [None if b is None else b.detach() for b in stack.biases]
        rows = len(self.x)
        self.outputs = [self.x.new_empty(rows, len(w)) for w in self.weights]
        self.d_pre = [torch.empty_like(h) for h in self.outputs]
        self.d_in = [self.x.new_empty(rows, w.shape[1]) for w in self.weights]
        self.d_weights = [torch.empty_like(w) for w in self.weights]
        self.d_biases = [None if b is None else torch.empty_like(b) for b in self.biases]

    @torch.no_grad()
    def __call__(self) -> tuple[Tensor, ...]:
        h = self.x
        for weight, bias, out in zip(self.weights, self.biases, self.outputs, strict=True):
            if bias is None:
                torch.mm(h, weight.t(), out=out)
            else:
                torch.addmm(bias, h, weight.t(), out=out)
            h = torch.relu_(out)
        d_out = self.dy
        for i in reversed(range(len(self.weights))):
            d_pre, d_bias, before = self.d_pre[i], self.d_biases[i], self.outputs[i - 1]
            torch.ops.aten.threshold_backward(d_out, self.outputs[i], 0, grad_input=d_pre)
            torch.mm(d_pre.t(), before if i else self.x, out=self.d_weights[i])
            if d_bias is not None:
                torch.sum(d_pre, 0, out=d_bias)
            d_out = torch.mm(d_pre, self.weights[i], out=self.d_in[i])
        biases = (b for b in self.d_biases if b is not None)
        return (self.outputs[-1], d_out, *self.d_weights, *biases)
