"""Sparse and nested tensors in a model: its linears that get them are left to PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.errors import InputError
from fastlinear.core.settings import Config
from fastlinear.rewrite import apply_, optimize_

pytestmark = [
    pytest.mark.usefixtures("fast"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "csc": lambda t: t.to_sparse_csc(),
    "bsr": lambda t: t.to_sparse_bsr((2, 2)),
    "mkldnn": lambda t: t.to_mkldnn(),
    "jagged": lambda t: torch.nested.nested_tensor([t, t[:3]], layout=torch.jagged),
}
STRIDED = torch.nested.nested_tensor([X, X[:3]])


class AsksForGradient(nn.Module):
    """As wav2vec2 does in training, so that a checkpoint behind frozen layers has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            x.requires_grad = True
        return self.second(self.act(self.first(x)))


def test_a_model_may_set_its_inputs_requires_grad() -> None:
    model = AsksForGradient().train()
    result = optimize_(model, X.clone(), config=Config(mode="train"))
    assert {"first", "second"} <= {site.fqn for site in result.sites}
    plain, found = AsksForGradient().train(), []
    plain.load_state_dict(model.state_dict())
    for one in (model, plain):
        x = X.clone()
        one(x).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


class TwoInputs(nn.Module):
    """One linear gets the odd input, one a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.act, self.dense = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)

    def forward(self, odd: Tensor, x: Tensor) -> Any:
        return self.act(self.odd(odd)), self.act(self.dense(x))


class MadeDense(TwoInputs):
    """The odd input is made dense first."""

    def forward(self, odd: Tensor, x: Tensor) -> Any:
        return self.odd(odd.to_dense() if odd.layout is not torch.jagged else x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_linears_with_odd_inputs_are_left_alone(kind: str, mode: str) -> None:
    model, inputs = TwoInputs().train(mode == "train"), (KINDS[kind](X), X)
    if kind == "mkldnn" or (mode == "train" and kind in ("bsr", "csc")):
        pytest.skip("PyTorch itself has no float64, or no backward, of it")
    report = fl.profile(model, inputs, mode)
    site = next(s for s in report.sites if s.fqn == "odd")
    assert (site.shapes, site.x_layouts, site.rows) == (((),), ("other",), 0)
    config = Config(mode=mode, draws=2, optimizer_steps=1)
    result = optimize_(model, inputs, config=config)
    sites = {s.fqn: s for s in result.sites}
    assert (sites["odd"].status, sites["odd"].code) == ("refused", "odd_input")
    assert sites["dense"].status == "kept", sites["dense"].reason
    plan = result.plan.to_json()
    result.revert()
    with pytest.raises(InputError, match="Pass inputs"):
        apply_(model, plan)
    assert apply_(model, plan, inputs).kept == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_odd_inputs_that_are_made_dense_hinder_nothing(kind: str, mode: str) -> None:
    model = MadeDense().train(mode == "train")
    config = Config(mode=mode, draws=2, optimizer_steps=1)
    result = optimize_(model, (KINDS[kind](X), X), config=config)
    assert {s.fqn: s.status for s in result.sites}["odd"] == "kept"


def test_a_rewritten_linear_takes_sparse_inputs_as_before() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
    sparse = X.to_sparse()
    with torch.no_grad():
        expected = model(sparse)
        assert optimize_(model, X).kept == 1
        torch.testing.assert_close(model(sparse), expected)


@pytest.mark.parametrize("run", [fl.profile, optimize_])
@pytest.mark.parametrize("inputs", [STRIDED, (STRIDED, X), {"odd": [STRIDED], "x": X}])
def test_nested_inputs_without_sizes_are_refused(run: Any, inputs: Any) -> None:
    with pytest.raises(InputError, match=r"nested tensor of layout torch\.strided") as caught:
        run(TwoInputs(), inputs)
    assert "layout=torch.jagged" in caught.value.remedy


def test_a_model_that_nests_inside() -> None:
    """What nn.TransformerEncoder does with a padding mask in evaluation."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[1, 5:] = True
    inputs = {"src": torch.randn(2, 8, 16), "src_key_padding_mask": mask}
    assert fl.profile(model, inputs).sites
    result = optimize_(model, inputs, config=Config(draws=1))
    assert all(v.passed for v in result.verdicts)


def test_sparse_gradients_are_compared() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.fc = nn.Embedding(8, 16, sparse=True), nn.Linear(16, 16)

        def forward(self, ids: Tensor) -> Tensor:
            return self.fc(self.table(ids))

    config = Config(mode="train", draws=2, optimizer_steps=2)
    result = optimize_(Embedded(), torch.arange(6), config=config)
    assert result.kept == 1
    names = {v.name for v in result.verdicts if v.passed}
    assert {"grad.table.weight", "optimizer steps: table.weight"} <= names
