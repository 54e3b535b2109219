"""A small MLP whose time is launches: eager, and as CUDA graphs, in inference and in training.

    python -m examples.graphed

Needs a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.timing import interleave


def mlp(layers: int = 8, width: int = 256) -> nn.Sequential:
    """Linear layers with ReLU between them, bfloat16."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts[:-1]).to("cuda", torch.bfloat16)


def main() -> None:
    """Time both ways side by side, over batches of changing size."""
    if not torch.cuda.is_available():
        raise SystemExit("examples.graphed needs a CUDA device; torch sees none.")
    model = mlp()
    fast = fl.graphed(model, batch_dim=0)
    batches = [torch.randn(m, 256, device="cuda", dtype=torch.bfloat16) for m in (64, 48, 33)]

    def infer(run: Callable[[Tensor], Tensor]) -> None:
        with torch.no_grad():
            for x in batches:
                run(x)

    def train(run: Callable[[Tensor], Tensor]) -> None:
        for x in batches:
            model.zero_grad()
            run(x).square().mean().backward()

    for what, work in (("inference", infer), ("training", train)):
        times = interleave(
            {"eager": lambda w=work: w(model), "graphed": lambda w=work: w(fast)}, device="cuda"
        )
        eager, ours = (times[name].median_us / len(batches) for name in ("eager", "graphed"))
        print(f"{what}: eager {eager:.0f} us a batch, graphed {ours:.0f} us, {eager / ours:.1f}x")
    print(fast.counts)


if __name__ == "__main__":
    main()
