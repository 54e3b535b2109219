"""One update of soft actor-critic with ten critics: eager, compiled, by fastlinear, by both.

    python -m examples.rl_update [--device cpu] [--rows 256] [--out rows.jsonl]

Every way computes the same update from the same batch and noise: losses of critics and actor, their
gradients, Adam, and the targets' moving average. On a GPU each is recorded as one CUDA graph, too;
`torch.compile` with a graph is how LeanRL makes such updates fast.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.environment import environment
from fastlinear.core.timing import interleave

OBSERVATION, ACTION, HIDDEN, CRITICS = 17, 6, 256, 10
GAMMA, TAU, ALPHA, RATE = 0.99, 0.005, 0.2, 3e-4
_CHECKED = 3  # updates behind which all ways are compared

Update = Callable[[], None]


class Stacked(nn.Module):
    """Ten linear layers as one batched product, as ensembles are written with PyTorch's own ops."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(k)
        self.weight = nn.Parameter(torch.empty(CRITICS, k, n).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(CRITICS, 1, n).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """x (critics, rows, k) → (critics, rows, n)."""
        return torch.baddbmm(self.bias, x, self.weight)


class Critics(nn.Module):
    """Ten critics of three layers by PyTorch's own ops."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (OBSERVATION + ACTION, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1)
        self.layers = nn.ModuleList(Stacked(*size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Observations beside actions (rows, features) → values (rows, critics)."""
        first, second, third = self.layers
        h = F.relu(first(x.expand(CRITICS, *x.shape)))
        return third(F.relu(second(h))).squeeze(-1).t()


class FastCritics(nn.Module):
    """The same by fastlinear, from the state of ``Critics``.

    All first layers take the same input: together they are one layer of ten times the width.
    """

    def __init__(self, like: Critics) -> None:
        super().__init__()
        self.first = fl.nn.Linear(OBSERVATION + ACTION, CRITICS * HIDDEN, activation="relu")
        self.second = fl.nn.GroupedLinear(CRITICS, HIDDEN, HIDDEN, activation="relu")
        self.third = fl.nn.GroupedLinear(CRITICS, HIDDEN, 1)
        for own, theirs in zip((self.first, self.second, self.third), like.layers, strict=True):
            with torch.no_grad():
                own.weight.copy_(theirs.weight.transpose(1, 2).reshape(own.weight.shape))
                own.bias.copy_(theirs.bias.reshape(own.bias.shape))

    def forward(self, x: Tensor) -> Tensor:
        """Observations beside actions (rows, features) → values (rows, critics)."""
        values: Tensor = self.third(self.second(self.first(x)))
        return values


def sampled(actor: nn.Module, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """An action (rows, actions) and the log of its density (rows, 1)."""
    mean, spread = actor(observation).chunk(2, -1)
    spread = spread.clamp(-5, 2)
    raw = mean + spread.exp() * noise
    density = -0.5 * noise.square() - spread - 0.5 * math.log(2 * math.pi)
    squashed = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
    return raw.tanh(), (density - squashed).sum(-1, keepdim=True)


@dataclass(frozen=True)
class Batch:
    """What an update reads: transitions, and the noise of two actions."""

    observation: Tensor
    action: Tensor
    reward: Tensor
    following: Tensor
    going_on: Tensor
    noise: Tensor
    next_noise: Tensor

    @staticmethod
    def drawn(rows: int, device: str) -> Batch:
        """A batch of random numbers."""
        sizes = (OBSERVATION, ACTION, 1, OBSERVATION, 1, ACTION, ACTION)
        parts = [torch.randn(rows, n, device=device) for n in sizes]
        parts[1], parts[4] = parts[1].tanh(), (parts[4] > -1.5).float()
        return Batch(*parts)


class Agent:
    """Networks, their targets and optimizers, and the update of all."""

    def __init__(self, actor: nn.Module, critics: nn.Module, targets: nn.Module) -> None:
        self.actor, self.critics = actor, critics
        self.targets = targets.requires_grad_(False)
        on_gpu = next(actor.parameters()).is_cuda
        how = {"lr": RATE, "fused": True, "capturable": on_gpu}
        self.by_actor = torch.optim.Adam(actor.parameters(), **how)
        self.by_critics = torch.optim.Adam(critics.parameters(), **how)

    def update(self, b: Batch) -> None:
        """One update of critics, actor and targets."""
        with torch.no_grad():
            action, density = sampled(self.actor, b.following, b.next_noise)
            values = self.targets(torch.cat((b.following, action), -1))
            least = values.amin(-1, keepdim=True) - ALPHA * density
            wanted = b.reward + GAMMA * b.going_on * least
        found = self.critics(torch.cat((b.observation, b.action), -1))
        critics = list(self.critics.parameters())
        loss = (found - wanted).square().mean(0).sum()
        for parameter, gradient in zip(critics, torch.autograd.grad(loss, critics), strict=True):
            parameter.grad = gradient
        self.by_critics.step()

        action, density = sampled(self.actor, b.observation, b.noise)
        values = self.critics(torch.cat((b.observation, action), -1))
        actor = list(self.actor.parameters())
        loss = (ALPHA * density - values.mean(-1, keepdim=True)).mean()
        for parameter, gradient in zip(actor, torch.autograd.grad(loss, actor), strict=True):
            parameter.grad = gradient
        self.by_actor.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.targets.parameters()), critics, TAU)


def agents(device: str) -> dict[str, Agent]:
    """One agent for each way, all of the same state."""

    def plain() -> Agent:
        torch.manual_seed(0)
        sizes = OBSERVATION, HIDDEN, HIDDEN, 2 * ACTION
        layers = [nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], sizes[2])]
        actor = nn.Sequential(*layers, nn.ReLU(), nn.Linear(sizes[2], sizes[3]))
        critics, targets = Critics(), Critics()
        targets.load_state_dict(critics.state_dict())
        return Agent(*(m.to(device) for m in (actor, critics, targets)))

    def fast() -> Agent:
        like = plain()
        actor = fl.nn.MLP.from_sequential(like.actor)  # type: ignore[arg-type]
        critics, targets = (FastCritics(c).to(device) for c in (like.critics, like.targets))  # type: ignore[arg-type]
        return Agent(actor, critics, targets)

    made = {"eager": plain(), "compiled": plain(), "fastlinear": fast()}
    return made | {"fastlinear, compiled": fast()}


def updates(made: dict[str, Agent], batch: Batch) -> dict[str, Update]:
    """The update of each agent, and on a GPU each as one CUDA graph."""
    runs: dict[str, Update] = {}
    for name, agent in made.items():
        update = torch.compile(agent.update) if name.endswith("compiled") else agent.update
        runs[name] = lambda update=update: update(batch)  # type: ignore[misc]
    if batch.reward.is_cuda:
        runs |= {f"{name}, recorded": recorded(run) for name, run in runs.items()}
    return runs


def recorded(run: Update) -> Update:
    """A run as one CUDA graph, which is replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def apart(made: dict[str, Agent], batch: Batch) -> float:
    """How far actors are from each other at most behind some updates, of their largest output."""
    for name in ("eager", "fastlinear"):
        for _ in range(_CHECKED):
            made[name].update(batch)
    with torch.no_grad():
        one, two = (made[name].actor(batch.observation) for name in ("eager", "fastlinear"))
    return float((one - two).abs().max() / one.abs().max())


def main() -> None:
    """Time all ways side by side, and print what they take."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=256, help="transitions of a batch")
    parser.add_argument("--out", type=Path, help="write what was measured as JSON, a line a way")
    given = parser.parse_args()
    batch = Batch.drawn(given.rows, given.device)
    print(f"actors apart by {apart(agents(given.device), batch):.1e} behind {_CHECKED} updates")
    runs = updates(agents(given.device), batch)
    samples = interleave(runs, device=given.device, metric="wall", budget_s=5.0)
    best = min(samples[name].median_us for name in runs if name.startswith("compiled"))
    print(f"{'update':32}{'us':>10}{'of compiled':>14}")
    for name in runs:
        us = samples[name].median_us
        print(f"{name:32}{us:10.0f}{us / best:14.2f}")
    if given.out is not None:
        env = environment(torch.device(given.device))
        told = [
            {"experiment": "rl_update", "rows": given.rows, "way": name, "metric": "wall"}
            | {"us": samples[name].median_us, "samples_us": list(samples[name].us), "env": env}
            for name in runs
        ]
        given.out.write_text("".join(json.dumps(row) + "\n" for row in told))


if __name__ == "__main__":
    main()
