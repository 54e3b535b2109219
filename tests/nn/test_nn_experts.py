"""fl.nn.Experts, and models of transformers whose experts run the op; tiny, random weights."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.families.experts.gate import gate_of, numbers_of
from fastlinear.nn import stacked_experts

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("transformers.integrations.moe")

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def mixtral() -> nn.Module:
    sizes = SIZES | {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def qwen3() -> nn.Module:
    sizes = SIZES | {"intermediate_size": 40, "moe_intermediate_size": 16, "num_experts": 6}
    sizes |= {"num_experts_per_tok": 3, "head_dim": 8, "norm_topk_prob": True}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))


def olmoe() -> nn.Module:
    sizes = SIZES | {"intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 3}
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**sizes))


def gpt_oss() -> nn.Module:
    sizes = SIZES | {"intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2}
    sizes |= {"head_dim": 8, "swiglu_limit": 0.05}  # which these random weights pass
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))


def deepseek_v3() -> nn.Module:
    sizes = SIZES | {"intermediate_size": 40, "moe_intermediate_size": 16, "n_routed_experts": 8}
    sizes |= {"num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    sizes |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    sizes |= {"v_head_dim": 8, "num_key_value_heads": 4}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": mixtral,
    "qwen3": qwen3,
    "olmoe": olmoe,
    "gpt-oss": gpt_oss,
    "deepseek-v3": deepseek_v3,
}


@pytest.fixture(autouse=True)
def _registered() -> None:
    fl.nn.Experts.register_with_transformers()


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    for p in model.parameters():  # larger than they start, biases too: gates open, routes differ
        nn.init.normal_(p, std=0.2)
    return model.to(dtype).eval()


def trained(model: Any, implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
    model.set_experts_implementation(implementation)
    model.zero_grad()
    tokens = torch.arange(22).view(2, 11) % 48
    logits = model(input_ids=tokens).logits
    logits.float().square().mean().backward()
    named = model.named_parameters()
    return logits.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None}


def stacked(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(m, "_apply_gate")]


@pytest.mark.parametrize("name", MODELS)
def test_models_run_the_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and all gradients, the router's among them, as by transformers' own loop."""
    model, ran = made(name), []
    op = stacked_experts.experts
    monkeypatch.setattr(stacked_experts, "experts", lambda *a, **k: ran.append(k) or op(*a, **k))
    expected, wanted = trained(model, "eager")
    assert not ran
    logits, grads = trained(model, "fastlinear")
    assert len(ran) == len(stacked(model)) > 0
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert set(grads) == set(wanted)
    for key, grad in grads.items():
        scale = wanted[key].abs().max().item()
        torch.testing.assert_close(grad, wanted[key], rtol=1e-3, atol=1e-4 * scale + 1e-7)
    assert any("gate" in key and grad.any() for key, grad in grads.items())


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_models_in_bfloat16(name: str) -> None:
    model = made(name, torch.bfloat16)
    expected, _ = trained(model, "batched_mm")
    logits, grads = trained(model, "fastlinear")
    assert all(g.isfinite().all() for g in grads.values())
    assert (logits - expected).float().norm() <= 0.1 * expected.float().norm()


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_models_compile_in_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model: Any = made(name)
    model.set_experts_implementation("fastlinear")
    (first, *_) = stacked(model)
    x = torch.randn(7, 32)
    index = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 3], [2, 0], [1, 3]])
    weight = torch.rand(7, 2)
    compiled = torch.compile(first, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, index, weight), first(x, index, weight))
    with torch.no_grad():
        tokens = torch.arange(22).view(2, 11) % 48
        whole = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(
            whole(input_ids=tokens, use_cache=False).logits,
            model(input_ids=tokens, use_cache=False).logits,
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("name", MODELS)
def test_converted_modules_compute_the_same(name: str) -> None:
    module = stacked(made(name))[0]
    layer = fl.nn.Experts.from_module(module)
    assert layer.state_dict().keys() == module.state_dict().keys()
    assert all(a is b for a, b in zip(layer.parameters(), module.parameters(), strict=True))
    count = module.down_proj.shape[0]
    x, weight = torch.randn(9, 32), torch.rand(9, 2)
    index = torch.arange(18).view(9, 2) % count
    torch.testing.assert_close(layer(x, index, weight), module(x, index, weight))
    text = repr(layer)
    assert f"experts={count}, features=32, hidden_features=" in text
    assert ("limit=0.05" in text) == (name == "gpt-oss")


def test_slots_of_other_devices_add_nothing() -> None:
    """Transformers marks them by the number of experts."""
    module: Any = stacked(made("mixtral"))[0]
    layer = fl.nn.Experts.from_module(module)
    x, weight, index = torch.randn(3, 32), torch.rand(3, 2), torch.tensor([[0, 4], [4, 4], [1, 3]])
    y = layer(x, index, weight)
    assert not y[1].any()
    torch.testing.assert_close(y[0], layer(x[:1], index[:1, :1], weight[:1, :1])[0])


@pytest.mark.parametrize("name", stacked_experts._CLAMPED)
def test_known_gates_are_those_of_transformers(name: str) -> None:
    """In float64, on both sides of the limit."""
    homes = {"GptOss": "gpt_oss", "OpenAI": "openai_privacy_filter", "MiniMax": "minimax_m3_vl"}
    folder = next((f for k, f in homes.items() if name.startswith(k)), "deepseek_v4")
    home = f"transformers.models.{folder}.modeling_{folder}"
    kind = getattr(pytest.importorskip(home), name)
    limit, alpha, _ = stacked_experts._CLAMPED[name]
    numbers = {limit: 0.7, **({alpha: 1.3} if alpha else {})}
    facts = {"has_gate": True, "has_bias": False, "is_transposed": False}
    fake = SimpleNamespace(act_fn=nn.functional.silu, **numbers)
    module: Any = kind.__new__(kind)
    nn.Module.__init__(module)
    for key, value in {**facts, "is_concatenated": name != "GptOssExperts", **numbers}.items():
        setattr(module, key, value)
    options = stacked_experts.options_of(module)
    assert isinstance(options, dict)
    given = numbers_of(options["limit"], options["alpha"], options["up_offset"])
    gate = gate_of(options["activation"], options["stacked"], given)
    pre = torch.randn(50, 8, dtype=torch.float64)
    torch.testing.assert_close(gate.value(pre), kind._apply_gate(fake, pre))


def test_what_is_not_known_is_refused() -> None:
    model: Any = made("mixtral")
    model.set_experts_implementation("fastlinear")
    module = stacked(model)[0]
    module.act_fn = nn.Hardswish()
    args = torch.randn(2, 32), torch.zeros(2, 1).long(), torch.ones(2, 1)
    with pytest.raises(UnsupportedError, match="activation Hardswish is not known"):
        module(*args)
    with pytest.raises(InputError, match="activation Hardswish"):
        fl.nn.Experts.from_module(module)
    with pytest.raises(InputError, match="not decorated"):
        fl.nn.Experts.from_module(nn.Linear(2, 2))
    module = stacked(made("mixtral"))[0]
    module.register_buffer("scale", torch.ones(1))
    with pytest.raises(InputError, match="more state: scale"):
        fl.nn.Experts.from_module(module)
    module = stacked(made("mixtral"))[0]
    module.register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match="hooks"):
        fl.nn.Experts.from_module(module)


def test_registering_is_opt_in() -> None:
    moe = import_module("transformers.integrations.moe")
    fl.nn.Experts.register_with_transformers("another_name")
    try:
        assert moe.ALL_EXPERTS_FUNCTIONS["another_name"] is stacked_experts.experts_forward
    finally:
        moe.ExpertsInterface._global_mapping.pop("another_name")


@pytest.mark.parametrize("transposed", [False, True])
def test_a_layer_of_its_own(transposed: bool) -> None:
    layer = fl.nn.Experts(3, 8, 4, bias=True, transposed=transposed, limit=7.0, alpha=1.702)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {
        "gate_up_proj": (3, 8, 8),
        "gate_up_proj_bias": (3, 8),
        "down_proj": (3, 4, 8) if transposed else (3, 8, 4),
        "down_proj_bias": (3, 8),
    }
    x, index, weight = torch.randn(2, 5, 8), torch.randint(3, (2, 5, 2)), torch.rand(2, 5, 2)
    y = layer(x, index, weight)
    assert y.shape == x.shape
    y.sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())
    flat = fl.experts(
        *(x.flatten(0, 1), index.flatten(0, 1), weight.flatten(0, 1)),
        *(layer.gate_up_proj, layer.down_proj, layer.gate_up_proj_bias, layer.down_proj_bias),
        transposed=transposed,
        limit=7.0,
        alpha=1.702,
    )
    assert torch.equal(y.flatten(0, 1), flat)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 0}, "at least one expert"),
        ({"features": -1}, "features to be a whole number"),
        ({"activation": "swish"}, "activation in"),
        ({"stacked": "apart"}, "stacked in"),
        ({"limit": -1.0}, "limit to be"),
        ({"backend": "sorted"}, "a backend of experts in"),
        ({"dtype": torch.int32}, "dtype in"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fl.nn.Experts(**{"experts": 2, "features": 4, "hidden_features": 4, **change})
