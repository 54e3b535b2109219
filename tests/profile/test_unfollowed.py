"""Every parameter of two or more dimensions that a step multiplies by is a site or named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlinear.profile import unfollowed
from fastlinear.profile.capture import profile
from fastlinear.profile.observe import observe
from fastlinear.profile.products import products_of
from fastlinear.profile.records import LinearSite, NotFollowed
from fastlinear.profile.sites import find_sites
from fastlinear.profile.step import watched_modules

X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))


class Of(nn.Module):
    """A model of given parts whose forward is a function of itself and its input."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 4)


def experts_by_index(self: Any, x: Tensor) -> Tensor:
    chosen = self.router(x).argmax(-1).reshape(-1)
    rows = x.reshape(-1, 8)
    return torch.bmm(self.w[chosen], rows.unsqueeze(-1)).squeeze(-1) + self.b[chosen]


def experts_by_loop(self: Any, x: Tensor) -> Tensor:
    chosen = self.router(x).argmax(-1)
    y = torch.zeros_like(x)
    for i in range(len(self.w)):
        y[chosen == i] = F.linear(x[chosen == i], self.w[i])
    return y + self.router(x).sum()


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **options)


def attention(**options: Any) -> nn.Module:
    return Of(
        lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(8, 2, batch_first=True, **options)
    )


def recurrent(part: nn.Module) -> nn.Module:
    return Of(lambda m, x: m.part(x)[0], part=part)


def tied(self: Any, x: Tensor) -> Tensor:
    return self.head(self.table(x.argmax(-1)))


def tied_head() -> nn.Module:
    model = Of(tied, table=nn.Embedding(8, 8), head=nn.Linear(8, 8, bias=False))
    model.head.weight = model.table.weight
    return model


def lookups(self: Any, x: Tensor) -> Tensor:
    ids = x.argmax(-1)
    return self.fc(self.table(ids) + self.places[:, : x.shape[1]] + self.rows[ids])


def merged(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.w + 0.5 * self.up @ self.down)


def conv(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def normed(layer: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(layer)


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "encoder layer": encoder,
    "encoder": lambda: nn.TransformerEncoder(encoder(), 2),
    "encoder layer, gelu first": lambda: encoder(norm_first=True, activation="gelu"),
    "attention": attention,
    "attention, unpacked": lambda: attention(kdim=8, vdim=8, add_bias_kv=True),
    "decoder layer": lambda: Of(
        lambda m, x: m.d(x, x), d=nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)
    ),
    "kernel 1": lambda: conv(nn.Conv1d(4, 6, 1), nn.ReLU(), nn.Conv1d(6, 4, 1)),
    "windows, groups": lambda: conv(nn.Conv1d(4, 8, 3, groups=2), nn.ConvTranspose1d(8, 4, 2)),
    "two dimensions": lambda: Of(
        lambda m, x: m.c(x.unsqueeze(1)), c=conv(nn.Conv2d(1, 3, 1), nn.Conv2d(3, 3, 2, groups=3))
    ),
    "normed": lambda: conv(normed(nn.Conv1d(4, 4, 1)), normed(nn.Linear(8, 8))),
    "lstm": lambda: recurrent(nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True)),
    "lstm, projected": lambda: recurrent(nn.LSTM(8, 6, batch_first=True, proj_size=3)),
    "gru": lambda: recurrent(nn.GRU(8, 6, batch_first=True)),
    "cell": lambda: Of(lambda m, x: m.cell(x[:, 0]), cell=nn.GRUCell(8, 6)),
    "bilinear": lambda: Of(lambda m, x: m.b(x, x), b=nn.Bilinear(8, 8, 3)),
    "experts by bmm": lambda: Of(lambda m, x: torch.bmm(x, m.w), w=weight(2, 8, 8)),
    "experts by baddbmm": lambda: Of(
        lambda m, x: torch.baddbmm(m.b, x, m.w), w=weight(2, 8, 8), b=weight(2, 1, 8)
    ),
    "experts by einsum": lambda: Of(
        lambda m, x: torch.einsum("btd,edh->ebth", x, m.w), w=weight(3, 8, 5)
    ),
    "heads by einsum": lambda: Of(
        lambda m, x: torch.einsum("btd,dhk->bthk", x, m.w), w=weight(8, 2, 3)
    ),
    "experts by index": lambda: Of(
        experts_by_index, w=weight(3, 8, 8), b=weight(3, 8), router=nn.Linear(8, 3)
    ),
    "experts by loop": lambda: Of(experts_by_loop, w=weight(3, 8, 8), router=nn.Linear(8, 3)),
    "tied embeddings": tied_head,
    "tied by hand": lambda: Of(
        lambda m, x: F.linear(m.table(x.argmax(-1)), m.table.weight), table=nn.Embedding(8, 8)
    ),
    "lookups": lambda: Of(
        lookups,
        table=nn.Embedding(8, 8),
        places=weight(1, 6, 8),
        rows=weight(8, 8),
        fc=nn.Linear(8, 8),
    ),
    "by its parent": lambda: Of(lambda m, x: F.linear(x, m.fc.weight), fc=nn.Linear(8, 8)),
    "from the left": lambda: Of(lambda m, x: m.w @ x, w=weight(5, 4)),
    "parts": lambda: Of(lambda m, x: x @ m.w[:4].T + (x @ m.w[4:].T), w=weight(8, 8)),
    "cast": lambda: Of(lambda m, x: x.double() @ m.w.double(), w=weight(8, 8)),
    "data of": lambda: Of(lambda m, x: torch.matmul(x, m.w.data), w=weight(8, 8)),
    "joined": lambda: Of(
        lambda m, x: F.linear(x, torch.cat([m.q, m.k])), q=weight(8, 8), k=weight(4, 8)
    ),
    "merged": lambda: Of(merged, w=weight(8, 8), up=weight(8, 2), down=weight(2, 8)),
    "latents": lambda: Of(
        lambda m, x: m.fc(m.latents) @ x.mT, latents=weight(3, 8), fc=nn.Linear(8, 8)
    ),
    "memory": lambda: Of(
        lambda m, x: F.scaled_dot_product_attention(x, m.k, m.v),
        k=weight(1, 5, 8),
        v=weight(1, 5, 8),
    ),
    "element by element": lambda: Of(lambda m, x: x * m.scale, scale=weight(4, 8)),
}
ADDED = {  # what is added, looked up or joined as rows, and multiplies nothing
    "lookups": {"table.weight", "places", "rows"},
    "experts by baddbmm": {"b"},
    "experts by index": {"b"},
    "attention, unpacked": {"a.bias_k", "a.bias_v"},
}


def run(model: nn.Module, args: Any, mode: str) -> tuple[list[LinearSite], tuple[NotFollowed, ...]]:
    """The sites and what is not followed, nothing timed."""
    model.train(mode == "train")
    args = args if isinstance(args, tuple) else (args,)

    def forward() -> None:
        with torch.set_grad_enabled(mode == "train"):
            model(*args)

    seen = observe(model, forward)
    sites = find_sites(model, seen, seen.module_calls).sites
    products = products_of(model, forward, watched_modules(model), False)
    assert products.failed is None
    left = unfollowed.not_followed(model, products, sites)
    assert sum(one.share for one in left) <= 1.0 + 1e-9
    return list(unfollowed.told(model, sites, left)), left


def reached(model: nn.Module, args: Any) -> set[str]:
    """The parameters of two or more dimensions whose values the output depends on, by brute force:
    NaN in them turns up in it."""
    args = args if isinstance(args, tuple) else (args,)
    found = set()
    for name, p in model.named_parameters():
        if p.dim() < 2:
            continue
        before = p.detach().clone()
        with torch.no_grad():
            p.fill_(float("nan"))
            y = model(*args)
            p.copy_(before)
        y = getattr(y, "logits", y)
        if bool(y.isnan().any()):
            found.add(name)
    return found


def check(model: nn.Module, args: Any, mode: str, added: set[str]) -> None:
    sites, left = run(model, args, mode)
    wanted = reached(model, args) - added
    names = {id(p): name for name, p in model.named_parameters()}
    named = {one.fqn for one in left}
    called = [
        model.get_submodule(s.fqn) for s in sites if s.calls and s.module_class != "Parameter"
    ]
    followed = {names[id(p)] for m in called for p in m.parameters()}
    followed |= {s.fqn for s in sites if s.module_class == "Parameter"}
    assert wanted <= followed | named
    assert named <= wanted
    assert all(one.reason.endswith((".", ")")) and one.code for one in left)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("name", PLAIN)
def test_every_weight_of_a_product_is_a_site_or_named(name: str, mode: str) -> None:
    torch.manual_seed(0)
    check(PLAIN[name](), X, mode, ADDED.get(name, set()))


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_stacked_experts_of_transformers(experts: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=3,
    )
    config._experts_implementation = experts
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    ids = torch.arange(6)[None]
    for mode in ("inference", "train"):
        check(model, ids, mode, {"model.embed_tokens.weight"})
    _, left = run(model, ids, "inference")
    shares = {one.fqn.rpartition(".")[2]: (one.code, round(one.share, 2)) for one in left}
    # flops a token: q and o 16 x 16 each, k and v too, gate 3 x 16, head 32 x 16, 2 experts
    experts_, rest = 2 * (48 * 16 + 16 * 24), 4 * 16 * 16 + 3 * 16 + 32 * 16
    both = experts_ + rest + 2 * 6 * 16  # and attention of 6 tokens
    assert shares == {
        "gate_up_proj": ("stacked", round(experts_ * 2 / 3 / both, 2)),
        "down_proj": ("stacked", round(experts_ / 3 / both, 2)),
    }


def codes(model: nn.Module, x: Tensor = X, mode: str = "inference") -> dict[str, str]:
    return {one.fqn: one.code for one in run(model, x, mode)[1]}


def test_the_code_says_what_stands_in_the_way() -> None:
    layer = encoder()
    own = {"self_attn.in_proj_weight": "torch_module", "self_attn.out_proj.weight": "by_parent"}
    both = dict.fromkeys(("linear1.weight", "linear2.weight"), "by_parent")
    assert codes(layer) == own | both
    assert codes(layer, mode="train") == own
    assert codes(PLAIN["kernel 1"]()) == dict.fromkeys(
        ("0.weight", "2.weight"), "pointwise_convolution"
    )
    assert set(codes(PLAIN["windows, groups"]()).values()) == {"convolution"}
    assert set(codes(PLAIN["gru"]()).values()) == {"recurrent"}
    assert codes(PLAIN["experts by index"]()) == {"w": "stacked"}
    assert codes(PLAIN["from the left"]()) == {"w": "written"}
    assert codes(PLAIN["parts"]()) == {"w": "part"}
    assert codes(PLAIN["cast"]()) == {"w": "computed"}
    assert codes(PLAIN["latents"]()) == {"latents": "constant"}
    assert codes(PLAIN["element by element"]()) == {"scale": "elementwise"}
    assert codes(PLAIN["linear"]()) == codes(PLAIN["tied embeddings"]()) == {}
    assert codes(PLAIN["lookups"]()) == codes(PLAIN["by its parent"]()) == {}


def test_under_autocast_and_inference_mode_too() -> None:
    model = PLAIN["experts by bmm"]()
    with torch.inference_mode():
        assert codes(model) == {"w": "stacked"}
    with torch.autocast("cpu", torch.bfloat16):
        model(X)  # leaves a cast of the weight behind
        assert codes(model) == {"w": "stacked"}


def test_a_layer_that_is_not_called_says_who_multiplies_by_its_weight() -> None:
    sites = {s.fqn: s for s in run(encoder(), X, "train")[0]}
    assert sites["self_attn.out_proj"].flags[-1] == "used_by_parent"
    assert (
        "code of MultiheadAttention multiplies by its weight" in sites["self_attn.out_proj"].reason
    )
    fc = {s.fqn: s for s in run(PLAIN["by its parent"](), X, "train")[0]}["fc"]
    assert fc.flags[-1] == "used_as_parameter"
    assert "as 'fc.weight'" in fc.reason
    spare = Of(lambda m, x: x * 2, fc=nn.Linear(8, 8))
    assert "multiplies" not in run(spare, X, "train")[0][0].reason


def test_the_profile_lists_them_with_their_share() -> None:
    model = nn.Sequential(nn.Conv1d(4, 12, 1), nn.Linear(8, 8))
    report = profile(model, X, steps=1)
    (one,) = report.not_followed
    conv, linear = 4 * 12 * 8, 12 * 8 * 8
    assert (one.fqn, one.parent_fqn, one.shape) == ("0.weight", "0", (12, 4, 1))
    assert one.flops == 2 * 2 * conv
    assert one.share == pytest.approx(conv / (conv + linear))
    (found,) = [f for f in report.findings if f.code == unfollowed.CODE]
    assert (found.fqn, found.flops, found.predicted_gain_us) == ("0", one.flops, 0.0)
    assert "nn.Linear on channels last" in found.message
    text = report.table()
    assert f"Not followed: {one.share:.1%}" in text
    assert "0.weight" in text
    data = json.loads(json.dumps(report.to_json()))
    assert data["not_followed"][0]["shape"] == [12, 4, 1]


def test_a_forward_that_cannot_be_watched_is_no_error() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("not here")
        return self.fc(x)

    report = profile(Of(forward, fc=nn.Linear(8, 8)), X, steps=1)
    assert report.not_followed == ()
    assert any("RuntimeError: not here" in note for note in report.notes)
    assert [s.calls for s in report.sites] == [1]


def test_functions_compiled_inside_a_forward_compile_as_before() -> None:
    inner = torch.compile(lambda x, w: x @ w, backend="eager", fullgraph=True)
    model = Of(lambda m, x: inner(x, m.w), w=weight(8, 8))
    report = profile(model, X, steps=1)
    assert {s.fqn for s in report.sites} | {one.fqn for one in report.not_followed} == {"w"}
    model(X)
