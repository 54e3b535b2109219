"""Backend ``rows_cuda`` of mlp: many rows through all layers in one kernel for Hopper, 16 bits.

Forward: one launch, in which hidden activations stay in shared memory. Backward: one launch for dy
→ dpre of every layer → dx, one for all dW and db over slices of the rows, one that adds the slices
up in their order. Weights whose rows do not begin on 16 bytes are copied first, all in one launch,
and x of such rows before the gradient of the first weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.device import device_facts
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.linear.padded_problem import padded_size
from fastlinear.families.mlp.cuda import operands
from fastlinear.families.mlp.cuda.rows import (
    GRADS_KERNEL,
    GRADS_SHARED,
    KERNEL,
    SUMS_KERNEL,
    Rows,
    Widths,
    grads_source,
    rows_for,
    shares_for,
    source,
)
from fastlinear.families.mlp.cuda.rows_plans import GradsPlan, RowsPlan
from fastlinear.families.mlp.problem import layer_activations
from fastlinear.families.mlp.reference import Biases, Needs, Weights, first_needed, layer_input
from fastlinear.kernels.cuda import compiled
from fastlinear.kernels.cuda.prepared import Plans

_NAME = "mlp (rows_cuda backend)"
_plans: Plans[RowsPlan] = Plans()
_grads_plans: Plans[GradsPlan] = Plans()


def forward(
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    final_activation: str,
    save: bool,
    *,
    config: Rows | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h_{i+1} = act_i(h_i W_iᵀ + b_i) for all layers, float32 accumulation.

    Args:
        x: (M, n_0) bfloat16 or float16; columns that do not lie side by side are copied.
        weights: per layer (n_{i+1}, n_i), x's dtype.
        biases: per layer (n_{i+1},) or None.
        activation, final_activation: names, for hidden layers and the last.
        save: whether to keep what the backward reads.
        config: launch configuration; None picks one.

    Returns:
        y (M, n_L), and per layer (M, n_{i+1}) its pre-activation or output (() unless ``save``).

    Raises:
        UnsupportedError: where no configuration holds the chain.
    """
    x = operands.rows_of(x)
    names = layer_activations(len(weights), activation, final_activation)
    widths = (x.shape[1], *(w.shape[0] for w in weights))
    pre = [save and activation_of(name).saved == "pre" for name in names]
    last = len(weights) - 1
    made = [x.new_empty(x.shape[0], n) for n in widths[1:]] if save else []
    y = made[-1] if save and not pre[-1] else x.new_empty(x.shape[0], widths[-1])
    given: list[Tensor | None] = [x, None, None]
    for i, (weight, bias) in enumerate(zip(operands.all_aligned(weights), biases, strict=True)):
        out = y if i == last else made[i] if save and not pre[i] else None
        aside = made[i] if pre[i] else None
        given += [weight, _dense(bias), out, aside, None]
    _launch(given, widths, widths, (activation, final_activation), False, any(pre), config)
    return y, tuple(made)


def backward(
    dy: Tensor,
    x: Tensor,
    weights: Weights,
    saved: tuple[Tensor, ...],
    activation: str,
    final_activation: str,
    needs: Needs,
    *,
    config: Rows | None = None,
) -> tuple[Tensor | None, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """Gradients of ``forward``: (dx, dWs, dbs), each None where ``needs`` does not ask for it.

    Args:
        dy: (M, n_L) of any strides.
        x, weights: as given to ``forward``.
        saved: as ``forward`` gives it.
        activation, final_activation: names.
        needs: (x, per layer weight, per layer bias).
        config: configuration of the launch that goes down the layers; None picks one.

    Accumulates in float32, in a fixed order: results are deterministic.

    Raises:
        UnsupportedError: where no configuration holds the chain.
    """
    need_x, need_ws, need_bs = needs
    rows, layers = x.shape[0], len(weights)
    x, dy = operands.rows_of(x), operands.rows_of(dy)
    stored = tuple([t.contiguous() for t in saved[: len(weights)]])  # others are outputs
    names = layer_activations(layers, activation, final_activation)
    stop = first_needed(needs)
    wanted = [i for i in range(stop, layers) if need_ws[i] or need_bs[i]]
    dpres: list[Tensor | None] = [None] * layers
    inputs: list[Tensor | None] = [None] * layers
    if stop < layers and need_ws[stop]:
        inputs[stop] = layer_input(stop, x, stored, names)
    for i in wanted:
        dpres[i] = operands.pitched(dy, weights[i].shape[0])
    graded = activation_of(names[-1]).saved != "none"
    if not graded and operands.on_16_bytes(dy):
        dpres[-1] = dy  # as it comes
    made = None if dpres[-1] is dy else dpres[-1]
    given: list[Tensor | None] = [dy, stored[-1] if graded else None, made]
    widths, pitches = [dy.shape[1]], [1 if made is None else made.stride(0)]
    dx = None
    first = stop + (not need_x)
    aligned = dict(enumerate(operands.all_aligned(weights[first:]), first))
    for i in reversed(range(first, layers)):
        n = weights[i].shape[1]
        below = activation_of(activation).saved
        aside = None
        out: Tensor | None
        if i == 0:
            out = dx = dy.new_empty(rows, n)
        else:
            out = dpres[i - 1]
            if need_ws[i] and (below == "pre" or n % 8):  # as dW's product reads it
                aside = operands.pitched(dy, n)
            if need_ws[i]:
                inputs[i] = stored[i - 1] if aside is None else aside
        read = stored[i - 1] if i and (below != "none" or aside is not None) else None
        given += [aligned[i], None, out, aside, read]
        widths.append(n)
        pitches.append(n if i == 0 else padded_size(n))
    if len(widths) == 1:
        dpres[-1] = _last(dy, stored[-1], names[-1])
    else:
        staged = any(t is not None for t in given[6::5])
        kinds = activation, final_activation
        _launch(given, tuple(widths), tuple(pitches), kinds, True, staged, config)
    dws: list[Tensor | None] = [None] * layers
    dbs: list[Tensor | None] = [None] * layers
    if wanted:
        for i in wanted:
            n, k = weights[i].shape
            dws[i] = dy.new_empty(n, k) if need_ws[i] else None
            dbs[i] = dy.new_empty(n) if need_bs[i] else None
        _grads(wanted, dpres, inputs, dws, dbs)
    return dx, tuple(dws), tuple(dbs)


def _last(dy: Tensor, saved: Tensor, activation: str) -> Tensor:
    """dpre of the last layer alone, in rows that begin on 16 bytes."""
    act = activation_of(activation)
    return operands.aligned(dy if act.saved == "none" else act.backward(dy, saved))


def _launch(
    given: list[Tensor | None],
    widths: Widths,
    pitches: tuple[int, ...],
    names: tuple[str, str],
    backward: bool,
    staged: bool,
    config: Rows | None,
) -> None:
    """A launch of ``rows.cu`` on tensors in the order of ``RowsPlan``."""
    into = given[0]
    assert into is not None
    rows, device = into.shape[0], into.device
    index = device.index
    lies = tuple([None if t is None else t.stride(0) for t in (into, *given[3::5])])
    absent = tuple([t is None for t in given])
    key = widths, pitches, rows, into.dtype, index, names, backward, lies, absent, config

    def plan() -> RowsPlan:
        with compiled.current(index):
            return made()

    def made() -> RowsPlan:
        units = device_facts(device).units
        chosen = config or rows_for(rows, widths, backward, staged, units)
        reason = "no configuration fits a multiprocessor"
        if chosen is not None:
            reason = chosen.invalid(widths, backward, staged) or ""
        if reason or chosen is None:
            raise UnsupportedError(_NAME, "a chain that it can hold", reason, _REMEDY)
        text = source(chosen, widths, into.dtype, *names, backward, staged)
        shared = chosen.shared_bytes(widths, backward, staged)
        kernel = compiled.kernel(text, KERNEL, shared, index)
        found = RowsPlan(kernel, chosen, widths, pitches, given)
        if not found.blocks:
            reason = f"the device cannot run a block of {shared} bytes"
            raise UnsupportedError(_NAME, "a device that runs its blocks", reason, _REMEDY)
        return found

    _plans.of(key, plan).run(*given)


def _grads(
    wanted: list[int],
    dpres: list[Tensor | None],
    inputs: list[Tensor | None],
    dws: list[Tensor | None],
    dbs: list[Tensor | None],
) -> None:
    """All dW and db, by the launches of ``row_grads.cu``."""
    given: list[Tensor | None] = [None]
    shapes = []
    for i in wanted:
        dpre, entering = dpres[i], inputs[i]
        assert dpre is not None
        if entering is None:  # only db is wanted: any input does
            entering = dpre
        entering = operands.aligned(entering)
        given += [dpre, entering, dws[i], dbs[i]]
        shapes.append((dpre.shape[1], entering.shape[1]))
    first = given[1]
    assert first is not None
    device, rows = first.device, first.shape[0]
    lies = [None if t is None else t.stride(0) for t in given]
    key = tuple(shapes), rows, first.dtype, device.index, tuple(lies)

    def plan() -> GradsPlan:
        with compiled.current(device.index):
            return made()

    def made() -> GradsPlan:
        text = grads_source(first.dtype)
        kernels = (
            compiled.kernel(text, GRADS_KERNEL, GRADS_SHARED, device.index),
            compiled.kernel(text, SUMS_KERNEL, 0, device.index),
        )
        shares = shares_for(rows, tuple(shapes), device_facts(device).units)
        return GradsPlan(kernels, shares, given)

    found = _grads_plans.of(key, plan)
    if found.parts:
        given[0] = torch.empty(found.parts, dtype=torch.float32, device=device)
    found.run(*given)


_REMEDY = "Choose another backend or leave the choice to dispatch."


def _dense(bias: Tensor | None) -> Tensor | None:
    return bias if bias is None or bias.is_contiguous() else bias.contiguous()
