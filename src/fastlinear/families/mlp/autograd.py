"""The autograd formula of mlp; the backends of its two pieces are given to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core import calls
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.problem import layer_activations
from fastlinear.families.mlp.reference import Needs, Weights
from fastlinear.fastpath import autograd_node
from fastlinear.op import differentiable

Grads = tuple[Tensor | None, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]


@dataclass(frozen=True, slots=True)
class Formula:
    """What one plan's autograd needs besides its tensors.

    Attributes:
        activation, final_activation: their names.
        layers: L.
        run: the forward's backend.
        backward: the backward's backend.
        hidden: for each hidden layer whether what it gave is kept beside its pre-activation;
            empty where the forward gives none, or the backward reads none.
    """

    node: ClassVar[str] = "MlpBackward"
    readers: ClassVar[tuple[int, ...]] = (-1,)  # all are kept: second derivatives start from them
    kept_readers: ClassVar[None] = None
    activation: str
    final_activation: str
    layers: int
    run: Callable[..., Any]
    backward: Callable[..., Any]
    hidden: tuple[bool, ...] = ()

    @property
    def kept(self) -> tuple[int, ...]:
        """How what each layer's backward reads is kept, then outputs of hidden layers."""
        last = autograd_node.KEPT[activation_of(self.final_activation).saved]
        inner, nothing = autograd_node.INTERNAL, autograd_node.NOTHING
        hidden = (inner if kept else nothing for kept in self.hidden)
        return (*(inner,) * (self.layers - 1), last, *hidden)

    def forward(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None
    ) -> tuple[Tensor | None, ...]:
        """y, for each layer what its backward reads besides the arguments, or None; then, where
        they are kept, the outputs of hidden layers."""
        bs = (None,) * self.layers if biases is None else tuple(biases)
        x2 = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        names = self.activation, self.final_activation
        more = (True,) if self.hidden else ()
        y, saved = self.run(x2, tuple(weights), bs, *names, True, *more)
        y = calls.as_result(y, (*x.shape[:-1], y.shape[-1]))
        kind = activation_of(self.final_activation).saved
        end = self.layers - 1
        last = {"none": None, "output": y, "pre": saved[end]}[kind]
        pairs = zip(saved[end + 1 :], self.hidden, strict=True)
        return (y, *saved[:end], last, *(h if kept else None for h, kept in pairs))

    def gradients(
        self,
        dy: Tensor,
        _: None,
        shape: tuple[int, ...],
        tensors: tuple[Tensor | None, ...],
        kept: tuple[Tensor | None, ...],
        needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        """One for each of ``tensors``; differentiable where a graph is asked for.

        Args:
            dy: gradient of y, of its shape.
            tensors: x, the L weights, then the L biases or a single None.
            kept: as ``forward`` gives it after y.
            needs: which gradients are wanted.
        """
        # create_graph wants differentiable gradients; batched and dual ones are for PyTorch's ops
        if torch.is_grad_enabled() or calls.beyond_memory(dy):
            return self._by_ops(dy, tensors, kept, needs)
        x, *rest = tensors
        assert x is not None
        weights = tuple(w for w in rest[: self.layers] if w is not None)
        given = len(rest) - self.layers
        need_bs = needs[1 + self.layers :] if given == self.layers else (False,) * self.layers
        wanted = (needs[0], needs[1 : 1 + self.layers], need_bs)
        names = self.activation, self.final_activation
        found = run_backward(dy, x, weights, list(kept), *names, wanted, self.backward)
        return (found[0], *found[1], *found[2][:given])

    def _by_ops(
        self,
        dy: Tensor,
        tensors: tuple[Tensor | None, ...],
        kept: tuple[Tensor | None, ...],
        needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        """As ``gradients``, by differentiable ops over what layers kept: none is computed again."""
        from fastlinear.families.linear import higher_order  # few calls come here

        x, *parameters = tensors
        assert x is not None
        weights, biases = self._parted(parameters)
        names = layer_activations(self.layers, self.activation, self.final_activation)
        acts = [activation_of(name) for name in names]
        need_ws, need_bs = self._parted(needs[1:], absent=False)
        h = x.reshape(-1, x.shape[-1])
        entering, gave, fused = [h], [], []
        each = zip(acts, kept[: self.layers], weights, biases, strict=True)
        for act, known, weight, bias in each:
            if known is None:  # of the last layer, whose derivative reads nothing
                gave.append(h)
                fused.append(False)
                break
            rows = known.detach().reshape(len(h), len(weight))
            fused.append(higher_order.passes_pay(rows, act.name))
            graded = partial(differentiable.grad_pre, act, fused=fused[-1])
            derivative = graded if act.saved == "output" else None
            multiply = higher_order.OURS if fused[-1] else None
            gave.append(differentiable.known_layer(rows, derivative, h, weight, bias, multiply))
            h = gave[-1]
            if act.saved == "pre":
                h = differentiable.activated(act, h, fused=fused[-1])
            entering.append(h)
        dws: list[Tensor | None] = [None] * self.layers
        dbs: list[Tensor | None] = [None] * self.layers
        dh = dy.reshape(-1, dy.shape[-1])
        first = reference.first_needed((needs[0], need_ws, need_bs))
        for i in reversed(range(first, self.layers)):
            dpre = differentiable.grad_pre(acts[i], dh, gave[i], fused=fused[i])
            product, bias_gradient = higher_order.OURS if fused[i] else differentiable.BY_TORCH
            dws[i] = product("grad_weight", dpre, entering[i]) if need_ws[i] else None
            dbs[i] = bias_gradient(dpre) if need_bs[i] else None
            dh = product("grad_input", dpre, weights[i]) if i > first or needs[0] else dh
        dx = dh.reshape(x.shape) if needs[0] else None
        return (dx, *dws, *dbs)[: len(tensors)]

    def _parted(self, parameters: Sequence[Any], absent: Any = None) -> tuple[Any, Any]:
        """Weights and biases, or what stands for each."""
        weights, biases = parameters[: self.layers], parameters[self.layers :]
        whole = len(biases) == self.layers
        return tuple(weights), tuple(biases) if whole else (absent,) * self.layers


class Mlp(torch.autograd.Function):
    """The one autograd formula of the family; backends sit below it."""

    @staticmethod
    def forward(ctx: Any, formula: Formula, x: Tensor, *parameters: Tensor | None) -> Tensor:
        """The whole chain; ``parameters`` are the L weights, then the L biases."""
        layers = formula.layers
        y, *kept = formula.forward(x, parameters[:layers], parameters[layers:])  # type: ignore[arg-type]
        ctx.save_for_backward(x, *parameters, *kept)
        ctx.formula = formula
        return y  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """(None, dx, dWs…, dbs…); differentiable by torch's own ops where a graph is asked for."""
        formula = ctx.formula
        saved = ctx.saved_tensors
        arguments = 1 + 2 * formula.layers
        tensors, kept = saved[:arguments], saved[arguments:]
        needs = calls.wanted(ctx)[1:]
        return (None, *formula.gradients(dy, None, dy.shape, tensors, kept, needs))


def run_backward(
    dy: Tensor,
    x: Tensor,
    weights: Weights,
    saved: list[Tensor | None],
    activation: str,
    final_activation: str,
    needs: Needs,
    run: Callable[..., Any],
) -> Grads:
    """Call a backward backend; what the last layer saved is None where its derivative reads
    nothing."""
    m = x.shape[:-1].numel()
    dy2 = dy.resolve_neg().reshape(m, dy.shape[-1])
    if not dy2.is_contiguous():  # an expanded gradient, as sum() makes
        dy2 = dy2.contiguous()
    end = len(weights) - 1
    stored = saved[end]
    last = dy2 if stored is None else stored.reshape(dy2.shape)
    x2 = x.reshape(m, x.shape[-1])
    kept = (*saved[:end], last, *saved[end + 1 :])
    dx, dws, dbs = run(dy2, x2, weights, kept, activation, final_activation, needs)
    return (None if dx is None else dx.view(x.shape)), dws, dbs
