"""An MLP really trained on scikit-learn's bundled digits, and its accuracy on held-out images.

fastlinear optimize examples.digits:trained_mlp
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

WIDTH = 512
EPOCHS = 12
BATCH = 128


@lru_cache(maxsize=1)
def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(train images (1347, 64), train labels, test images (450, 64), test labels)."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    split = train_test_split(
        digits.data, digits.target, test_size=0.25, random_state=0, stratify=digits.target
    )
    x_train, x_test, y_train, y_test = (torch.tensor(part) for part in split)
    return x_train.float() / 16, y_train.long(), x_test.float() / 16, y_test.long()


def trained_mlp() -> nn.Module:
    """64 → 512 → 512 → 10 with GELU, trained for a few seconds; the same weights every time."""
    x, y, _, _ = data()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, 10),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(x)).split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
    return model.eval()


def held_out_images() -> Tensor:
    """The held-out images, shape (450, 64)."""
    return data()[2]


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Share of the held-out images the model names right."""
    _, _, x, y = data()
    where = next(model.parameters()).device
    return float((model(x.to(where)).argmax(-1).cpu() == y).float().mean())


trained_mlp.example_inputs = held_out_images  # type: ignore[attr-defined]
