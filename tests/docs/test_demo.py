"""What the demonstration rests on: published sizes, a model that really learned, honest rows."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package of examples, with its modules."""
    monkeypatch.syspath_prepend(str(ROOT))
    for name in ("models", "digits", "demo", "rl_update"):
        importlib.import_module(f"examples.{name}")
    return importlib.import_module("examples")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("bert", 109_482_240),
        ("vit", 86_389_248),
        ("smollm", 134_515_008),
        ("t5", 109_628_544),
    ],
)
def test_models_have_their_published_sizes(
    examples: ModuleType, name: str, parameters: int
) -> None:
    pytest.importorskip("transformers")
    factory = getattr(examples.models, name)
    with torch.device("meta"):
        model = factory()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert isinstance(factory.example_inputs(), dict)


def test_digits_mlp_learned(examples: ModuleType) -> None:
    pytest.importorskip("sklearn")
    before = torch.random.get_rng_state()
    model = examples.digits.trained_mlp()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert examples.digits.accuracy(model) > 0.95
    again = examples.digits.trained_mlp()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_ways_of_an_update_agree(examples: ModuleType) -> None:
    way = examples.rl_update
    torch.manual_seed(0)
    batch = way.Batch.drawn(256, "cpu")  # of few rows Adam takes noise for signs
    made = way.agents("cpu")
    assert way.apart(made, batch) < 1e-4
    before = [p.clone() for p in made["compiled"].actor.parameters()]
    after = list(made["eager"].actor.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_rows_add_up_layers_and_keep_outcomes_apart(examples: ModuleType) -> None:
    def site(fqn: str, status: str, before: float | None, after: float | None) -> dict[str, object]:
        return {
            "fqn": fqn,
            "activation": "relu",
            "status": status,
            "code": "",
            "reason": f"{status}, {before}x",
            "predicted_gain_us": 500.0,
            "before_us": before,
            "after_us": after,
        }

    rows = examples.demo.rows_of(
        [
            site("h.0.fc", "kept", 3000.0, 1000.0),
            site("h.1.fc", "kept", 4000.0, 1000.0),
            site("h.2.fc", "rejected", 1000.0, 1500.0),
            site("head", "refused", None, None),
        ]
    )
    assert [row[:2] for row in rows] == [("h.*.fc", "2"), ("h.2.fc", "1"), ("head", "1")]
    assert rows[0][3:6] == ("+1.00 ms", "+5.00 ms", "kept")
    assert rows[1][4] == "-0.50 ms"
    assert rows[2][4] == "-"
