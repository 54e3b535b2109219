"""GPT-2, BERT and ViT of the transformers package, tiny and with random weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fastlinear.core.settings import Config
from fastlinear.rewrite import apply_, optimize_
from tests.rewrite.rewrite_models import snapshot

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("fast"),
    pytest.mark.filterwarnings("ignore"),
]


def gpt2() -> tuple[nn.Module, Any]:
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config), {"input_ids": torch.randint(64, (2, 8))}


def bert() -> tuple[nn.Module, Any]:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.BertModel(config), {
        "input_ids": torch.randint(64, (2, 8)),
        "attention_mask": torch.ones(2, 8, dtype=torch.long),
    }


def vit() -> tuple[nn.Module, Any]:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=8, patch_size=4,
    )  # fmt: skip
    return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 8, 8)}


@pytest.mark.parametrize("make", [gpt2, bert, vit])
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_optimize_verify_revert(make: Any, mode: str) -> None:
    model, inputs = make()
    model.train(mode == "train")
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    before = snapshot(model)
    keys = list(model.state_dict())
    result = optimize_(model, inputs, config=Config(mode=mode, draws=2, optimizer_steps=2))
    assert list(model.state_dict()) == keys
    acts = {s.activation for s in result.sites if s.status == "kept"}
    assert acts == ({"gelu_tanh", "none"} if make is gpt2 else {"gelu", "none"}) | (
        {"tanh"} if make is bert or make is vit else set()
    )
    assert result.kept == len(result.sites)
    assert all(v.passed for v in result.verdicts)
    with torch.no_grad():
        twin = copy.deepcopy(model)(**inputs)[0]
        assert torch.equal(model(**inputs)[0], twin) or mode == "train"
    plan = result.plan.to_json()
    result.revert()
    assert snapshot(model) == before
    again = apply_(model, plan, inputs)
    assert again.kept == result.kept
    again.revert()
    assert snapshot(model) == before
    if make is gpt2:
        assert {s.problem["options"]["w"] for s in result.sites if "c_" in s.fqn} == {"kn"}


class FunctionalConv1D(nn.Module):
    """Conv1D, whose weight is (K, N), with its activation as a function in the parent."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.fc = Conv1D(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.relu(self.fc(x))


def test_conv1d_on_the_parent_route() -> None:
    model, x = FunctionalConv1D().eval(), torch.randn(8, 16)
    with torch.no_grad():
        expected = model(x)
        result = optimize_(model, x)
        assert [(s.status, s.route) for s in result.sites] == [("kept", "parent")]
        torch.testing.assert_close(model(x), expected)
