"""Reinforcement learning: policies, critics and world models."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.suite.families.blocks import mlp
from benchmarks.suite.family import Built, Family, of_torch

KIND = "reinforcement"
_STATE, _ACTION, _ROWS = 17, 6, 256


class _ActorCritics(nn.Module):
    """SAC: a squashed Gaussian actor and two critics that judge its action; (B, S)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(_STATE, 256, 256, final=nn.ReLU())
        self.mean, self.log_std = nn.Linear(256, _ACTION), nn.Linear(256, _ACTION)
        self.critics = nn.ModuleList(mlp(_STATE + _ACTION, 256, 256, 1) for _ in range(2))

    def forward(self, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(state)
        std = self.log_std(h).clamp(-20, 2).exp()
        action = torch.tanh(self.mean(h) + std * noise)
        x = torch.cat((state, action), -1)
        return action, torch.stack([critic(x) for critic in self.critics])


class _PolicyValue(nn.Module):
    """PPO: a policy and a value, tanh between layers; (B, S)."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = mlp(_STATE, 64, 64, _ACTION, act=nn.Tanh)
        self.value = mlp(_STATE, 64, 64, 1, act=nn.Tanh)
        self.log_std = nn.Parameter(torch.zeros(_ACTION))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.policy(state), self.log_std.exp(), self.value(state)


class _Dueling(nn.Module):
    """A dueling DQN: value and advantages behind one trunk; (B, S) → (B, A)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(128, 512, 512, final=nn.ReLU())
        self.value, self.advantages = mlp(512, 256, 1), mlp(512, 256, 18)

    def forward(self, state: Tensor) -> Tensor:
        h = self.trunk(state)
        a = self.advantages(h)
        return self.value(h) + a - a.mean(-1, keepdim=True)


class _Ensemble(nn.Module):
    """TD3 or REDQ: critics side by side, the least of them; (B, S + A) → (B, 1)."""

    def __init__(self, members: int) -> None:
        super().__init__()
        self.critics = nn.ModuleList(mlp(_STATE + _ACTION, 256, 256, 1) for _ in range(members))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.stack([critic(x) for critic in self.critics])
        return q, q.amin(0)


class _Dynamics(nn.Module):
    """An ensemble of dynamics models with stacked weights, as in PETS; (G, B, K) → (G, B, N)."""

    def __init__(self, members: int) -> None:
        super().__init__()
        widths = (_STATE + _ACTION, 200, 200, 2 * _STATE)
        pairs = list(pairwise(widths))
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(members, k, n) * k**-0.5) for k, n in pairs
        )
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(members, 1, n)) for _, n in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            x = nn.functional.silu(x) if i < 2 else x
        return x


class _World(nn.Module):
    """The recurrent state-space model of Dreamer over a few steps; (B, T, E)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = mlp(32 + _ACTION, 200, final=nn.ELU())
        self.cell = nn.GRUCell(200, 200)
        self.posterior = mlp(200 + 64, 200, 64, act=nn.ELU)

    def forward(self, embedded: Tensor, actions: Tensor) -> Tensor:
        h, z, found = embedded.new_zeros(embedded.shape[0], 200), embedded.new_zeros(64, 32), []
        for t in range(4):
            h = self.cell(self.enter(torch.cat((z, actions[:, t]), -1)), h)
            mean, std = self.posterior(torch.cat((h, embedded[:, t]), -1)).chunk(2, -1)
            z = mean + nn.functional.softplus(std) * 0.1
            found.append(torch.cat((h, z), -1))
        return torch.stack(found, 1)


def _sac() -> Built:
    return _ActorCritics(), (torch.randn(_ROWS, _STATE), torch.randn(_ROWS, _ACTION))


def _ppo() -> Built:
    return _PolicyValue(), torch.randn(64, _STATE)


def _dqn() -> Built:
    return mlp(128, 512, 512, 18), torch.randn(_ROWS, 128)


def _dueling() -> Built:
    return _Dueling(), torch.randn(_ROWS, 128)


def _td3() -> Built:
    return _Ensemble(2), torch.randn(_ROWS, _STATE + _ACTION)


def _redq() -> Built:
    return _Ensemble(10), torch.randn(_ROWS, _STATE + _ACTION)


def _pets() -> Built:
    return _Dynamics(7), torch.randn(7, _ROWS, _STATE + _ACTION)


def _dreamer() -> Built:
    return _World(), (torch.randn(64, 4, 64), torch.randn(64, 4, _ACTION))


FAMILIES: tuple[Family, ...] = of_torch(
    KIND,
    sac=_sac,
    ppo=_ppo,
    dqn=_dqn,
    dueling_dqn=_dueling,
    td3_critics=_td3,
    redq_critics=_redq,
    pets_dynamics=_pets,
    dreamer_rssm=_dreamer,
)
