"""QuACK (package quack-kernels, CuTe-DSL kernels for Hopper and newer) as a contender.

Its own tuner compiles some forty configurations a GEMM, about two minutes per shape. Here each
GEMM takes the fastest of ``CONFIGS``, QuACK's default first, measured on the case's own tensors;
the row's ``chosen`` names them. Forward: one GEMM with bias and activation in its epilogue.
Forward+backward: QuACK's own autograd function of Linear and activation, which also writes the
pre-activation; its gradient starts there, so the activation's derivative is PyTorch's elementwise
kernel.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.case import Case
from benchmarks.harness.peer import Told
from benchmarks.harness.work import Stack, Work
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.timing import interleave

NAMES: dict[str, str | None] = {
    "none": None,
    "relu": "relu",
    "relu2": "relu_sq",
    "silu": "silu",
    "gelu_tanh": "gelu_tanh_approx",
    "tanh": "tanh",
}
CONFIGS = (
    (128, 192, True),
    (192, 128, True),
    (128, 256, False),
    (256, 128, False),
    (256, 192, False),
)
"""(rows, columns of a tile, ping-pong or cooperative), each in clusters of 2; the default first."""


def reason_not(case: Case) -> str | None:
    """Why QuACK takes no part in a case, or None."""
    if case.device != "cuda":
        return "QuACK runs on CUDA devices only"
    if importlib.util.find_spec("quack") is None:
        return "the package quack-kernels is not installed"
    if importlib.util.find_spec("cutlass") is None:
        return "QuACK needs the package nvidia-cutlass-dsl, which is not installed"
    if case.dtype not in ("bfloat16", "float16"):
        return "QuACK's GEMMs take 16-bit dtypes"
    if case.option("activation") not in NAMES:
        return f"QuACK has no {case.option('activation')}"
    if case.needs_grad and case.dim("L") != 1:
        return "forward and backward are measured for single layers"
    if torch.cuda.get_device_capability()[0] != 9:
        return "its configurations here are those of compute capability 9.0"
    return None


def build(work: Work) -> Told:
    """The unit of work of a case, and the configuration of each of its GEMMs."""
    return _training(work) if work.case.needs_grad else _inference(work)


def _inference(work: Work) -> Told:
    config, said = _fastest(work, lambda stack, config: _chain(stack, config))
    chosen = {"quack-kernels": importlib.metadata.version("quack-kernels"), "forward": said}
    return Told(lambda i: (_chain(work.stacks[i], config),), chosen)


def _chain(stack: Stack, config: Any) -> Tensor:
    y = stack.x
    for weight, bias in zip(stack.weights, stack.biases, strict=True):
        _, y = _forward(y, weight.t(), bias, NAMES[stack.activation], False, config)
    return y


def _training(work: Work) -> Told:
    from quack.linear import LinearActFunc

    name = NAMES[work.case.option("activation")]
    derivative = activation_of(work.case.option("activation"))
    (stack, *_) = work.stacks
    dpre = torch.randn_like(stack.dy)

    def first(s: Stack, config: Any) -> object:
        return _forward(s.x, s.weights[0].t(), s.biases[0], name, True, config)

    with torch.no_grad():
        forward, said = _fastest(work, first)
        dx, said_dx = _fastest(work, lambda s, config: _product(dpre, s.weights[0], config))
        dw, said_dw = _fastest(work, lambda s, config: _product(dpre.T, s.x, config))

    def forward_fn(x: Tensor, w: Tensor, *, bias: Any, activation: Any, store_preact: bool) -> Any:
        return _forward(x, w, bias, activation, store_preact, forward)

    def dw_fn(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert out_dtype == a.dtype
        return _product(a, b, dw)

    gemms = SimpleNamespace(
        matmul_fwd_fn=forward_fn,
        matmul_bwd_dx=partial(_product, config=dx),
        matmul_bwd_dw=dw_fn,
        matmul_bwd_dw_inplace=None,
    )

    def unit(i: int) -> tuple[Tensor, ...]:
        s = work.stacks[i]
        pre, y = LinearActFunc.apply(s.x, s.weights[0], name, s.biases[0], True, False, gemms)
        saved = y if derivative.saved == "output" else pre.detach()
        start = derivative.backward(s.dy, saved)
        inputs = [t for t in (s.x, *s.parameters) if t.requires_grad]
        return (y, *torch.autograd.grad(pre, inputs, start))

    chosen = {
        "quack-kernels": importlib.metadata.version("quack-kernels"),
        "forward": said,
        "grad_input": said_dx,
        "grad_weight": said_dw,
    }
    return Told(unit, chosen)


def _forward(
    x: Tensor, w: Tensor, bias: Tensor | None, name: str | None, keep: bool, config: Any
) -> tuple[Tensor | None, Tensor]:
    """(pre-activation if ``keep``, output) of one layer; x (M, K), w (K, N)."""
    from quack.gemm_interface import gemm_act

    pre, y = gemm_act(
        x, w, bias=bias, activation=name, store_preact=keep, tuned=False, config=config
    )
    return pre, y


def _product(a: Tensor, b: Tensor, config: Any) -> Tensor:
    """a (M, K) times b (K, N) as QuACK's own autograd does it, with the dynamic scheduler."""
    from quack.gemm_interface import gemm_tuned

    out = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    gemm_tuned.fn(a, b, out, dynamic_scheduler=True, config=config)
    return out


def _fastest(work: Work, call: Callable[[Stack, Any], object]) -> tuple[Any, str]:
    """The config under which ``call`` takes the least device time, and its description."""
    from quack.gemm_config import GemmConfig

    arms: dict[str, Callable[[], object]] = {}
    configs = {}
    for rows, columns, pingpong in CONFIGS:
        name = f"{rows}x{columns} {'ping-pong' if pingpong else 'cooperative'}"
        config = GemmConfig(
            tile_m=rows,
            tile_n=columns,
            pingpong=pingpong,
            cluster_m=2,
            cluster_n=1,
            is_dynamic_persistent=False,
            device_capacity=9,
        )
        configs[name] = config
        arms[name] = partial(call, work.stacks[0], config)
    samples = interleave(
        arms, device=work.stacks[0].x.device, metric="device", rounds=7, budget_s=1.0
    )
    best = min(samples, key=lambda n: samples[n].median_us)
    return configs[best], best
