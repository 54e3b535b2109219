"""The Hopper kernels of gated_mlp: choices and offline compilation anywhere, the rest on Hopper."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES
from fastlinear.core.compare import judge
from fastlinear.families.gated import reference
from fastlinear.families.gated.cuda import backend, bias_sums
from fastlinear.families.gated.cuda.config import CANDIDATES, Config, config_for
from fastlinear.families.gated.problem import problem
from fastlinear.families.gated.stacking import Biases, Weights
from tests.families import nvrtc_offline as nvrtc
from tests.families.hopper_only import hopper_tests

PIECES = ("forward", "backward")
EVERY = [(piece, config) for piece in PIECES for config, _ in CANDIDATES[piece]]
EVERY += [
    ("backward", Config(128, 192, 3, cluster=1, group_m=16, block=32)),
    ("backward", Config(128, 128, 3, cluster=1, sets=3)),
    ("backward", Config(128, 128, 5, cluster=1, group_m=16, sets=3, block=32)),
    ("backward", Config(64, 128, 6, cluster=1, sets=4, block=32)),
    ("forward", Config(256, 128, 4, pingpong=False)),
]


# ---------------------------------------------------------------- anywhere


@pytest.mark.parametrize("m", [1, 7, 64, 200, 4096, 100_000])
@pytest.mark.parametrize("h", [8, 96, 4096, 11008, 28672])
@pytest.mark.parametrize("piece", PIECES)
def test_config_for_is_always_buildable(piece: str, m: int, h: int) -> None:
    assert config_for(piece, m, h).invalid(piece) is None


@pytest.mark.parametrize(
    ("piece", "config"),
    [
        ("forward", Config(96, 128, 4)),
        ("forward", Config(128, 200, 4)),
        ("forward", Config(128, 256, 4)),
        ("forward", Config(128, 192, 6)),
        ("forward", Config(128, 192, 4, cluster=4)),
        ("backward", Config(128, 192, 4)),
        ("backward", Config(128, 192, 3, sets=3)),
    ],
)
def test_impossible_configs_are_named(piece: str, config: Config) -> None:
    assert config.invalid(piece)


def test_what_it_does_not_serve() -> None:
    def reason(
        piece: str = "forward", sizes: tuple[int, ...] = (32, 64, 48, 24), **how: Any
    ) -> Any:
        given: Any = {"dtype": "bfloat16", "device": "cuda", **how}
        return backend.reason_not_sizes(problem(piece, *sizes, **given))

    assert reason() is None
    assert reason("backward") is None
    assert reason(dtype="float16", order="up_gate") is None
    assert "float32" in reason(dtype="float32")
    assert "dense" in reason(w="strided")
    assert "multiples" in reason(sizes=(32, 65, 48, 24))
    assert "multiples" in reason(sizes=(32, 64, 44, 24))
    assert reason(sizes=(32, 64, 48, 20)) is None, "y is cuBLAS's"
    assert "multiples" in reason("backward", sizes=(32, 64, 48, 20))
    assert "down" in reason("backward", sizes=(32, 64, 48))
    assert reason(order="interleaved") is None
    assert "interleaved" in reason(order="interleaved", needs_grad=True)
    assert "interleaved" in reason("backward", order="interleaved")


def _macros(piece: str, more: bool) -> dict[str, int]:
    if piece == "forward":
        return {"GATE_BIAS": int(more), "UP_BIAS": int(more), "SAVE": int(more)}
    return {"NEED_H": 1, "SUMS": int(more), "DOWN_SUMS": int(more)}


def _frame(piece: str, config: Config, activation: str, more: bool) -> int:
    """Bytes of local memory."""
    text = backend.source(
        piece, config, torch.bfloat16, activation, _macros(piece, more), piece != "forward"
    )
    found = nvrtc.usage(text, f"{piece}.cu", "sm_90a")[f"gated_{piece}"]
    assert found.registers <= 168, "384 threads share 65536 registers"
    return int(found.frame)


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize(("piece", "config"), EVERY, ids=str)
def test_keeps_all_in_registers(piece: str, config: Config, more: bool) -> None:
    assert _frame(piece, config, "silu", more) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_biases_keep_all_in_registers(dtype: torch.dtype) -> None:
    for found in nvrtc.usage(bias_sums.source(dtype), "bias_sums.cu", "sm_90a").values():
        assert found.registers <= 64, "two blocks of 512 threads share 65536"
        assert found.frame == 0


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("piece", PIECES)
def test_every_activation_does(piece: str, activation: str) -> None:
    config = CANDIDATES[piece][0][0]
    assert _frame(piece, config, activation, False) == 0
    assert _frame(piece, config, activation, True) == 0


# ---------------------------------------------------------------- on the device


def _draw(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, order: str, bias: str
) -> tuple[Tensor, Weights, Biases, Tensor]:
    m, k, h, n = sizes
    generator = torch.Generator(device="cuda").manual_seed(3)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device="cuda") * scale
        return values.to(dtype)

    apart = order == "apart"
    rows = h if apart else 2 * h
    weights = Weights(
        draw(rows, k, scale=k**-0.5),
        draw(h, k, scale=k**-0.5) if apart else None,
        draw(n, h, scale=h**-0.5),
    )
    gate = draw(rows) if bias in ("yes", "gate") else None
    up = draw(h) if apart and bias == "yes" else None
    biases = Biases(gate, up, draw(n) if bias == "yes" else None)
    return draw(m, k), weights, biases, draw(m, n)


def _compare(
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    order: str,
    bias: str,
    activation: str = "silu",
) -> None:
    x, weights, biases, dy = _draw(sizes, dtype, order, bias)

    # the backwards start from one set of pre-activations: rounding must not choose at a kink
    pre = reference.pre_activations(x, weights, biases)
    names = activation, order

    def run(module: Any, to: torch.dtype) -> dict[str, Tensor]:
        def as_(t: Tensor | None) -> Any:
            return None if t is None else t.to(to)

        w, b = Weights(*map(as_, weights)), Biases(*map(as_, biases))
        y, gate, up = module.forward(x.to(to), w, b, *names, True)
        plain = module.forward(x.to(to), w, b, *names, False)[0]
        needs: Any = (True, *(t is not None for t in (*weights, *biases)))
        kept = as_(pre[0]), as_(pre[1])
        grads = module.backward(dy.to(to), kept, x.to(to), w, b, *names, needs)
        named = {
            "y": y,
            "plain": plain,
            "gate": gate,
            "up": up,
            **dict(zip("xgudabc", grads, strict=True)),
        }
        return {name: t for name, t in named.items() if t is not None}

    expected, own, theirs = (
        run(reference, torch.float64),
        run(backend, dtype),
        run(reference, dtype),
    )
    assert own.keys() == expected.keys()
    for name, oracle in expected.items():
        verdict = judge(name, own[name], theirs[name], oracle)
        assert verdict.passed, (sizes, order, bias, activation, verdict)


# M, N, rows of parts, H
SUMMED = [
    (1, 8, 1, 8),
    (7, 72, 4, 104),
    (64, 4096, 4, 11008),
    (513, 136, 36, 520),
    (1500, 1032, 128, 4096),
    (4096, 1024, 129, 72),
    (20000, 264, 700, 264),
]
SIZES = [
    (1, 8, 8, 8),
    (5, 64, 96, 64),
    (64, 72, 104, 40),
    (130, 136, 200, 72),
    (257, 200, 520, 136),
    (1000, 1024, 1032, 512),
    (4096, 256, 2048, 256),
]


class TestOnHopper:
    pytestmark = hopper_tests

    @pytest.mark.parametrize("order", ["apart", "gate_up", "up_gate"])
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_as_the_oracle(self, sizes: tuple[int, int, int, int], order: str) -> None:
        _compare(sizes, torch.bfloat16, order, "no")
        _compare(sizes, torch.float16, order, "yes")

    @pytest.mark.parametrize("activation", NAMES)
    def test_every_activation(self, activation: str) -> None:
        _compare((200, 136, 264, 72), torch.bfloat16, "apart", "yes", activation)
        _compare((200, 136, 264, 72), torch.float16, "gate_up", "gate", activation)

    @pytest.mark.parametrize(("piece", "config"), EVERY, ids=str)
    def test_every_configuration(
        self, piece: str, config: Config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chosen = config_for

        def forced(of: str, m: int, h: int) -> Config:
            return config if of == piece else chosen(of, m, h)

        monkeypatch.setattr(backend, "config_for", forced)
        for sizes in ((600, 136, 520, 200), (4000, 512, 2056, 520)):
            _compare(sizes, torch.bfloat16, "apart", "yes")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("sizes", SUMMED, ids=str)
    def test_sums_of_biases(self, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        """Any rows, features at the edge of a block, rows of dy that lie apart, halves that are not
        wanted: each gradient is the nearest number to its sum but for the order of adding."""
        m, n, rows, h = sizes
        generator = torch.Generator(device="cuda").manual_seed(5)
        wide = torch.randn((m, n + 8), generator=generator, device="cuda").to(dtype)
        parts = torch.randn((2, rows, h), generator=generator, device="cuda")
        for dy in (wide[:, :n], wide[:, 8:], wide[:, :n].contiguous()):
            expected = (*parts.double().sum(1), dy.double().sum(0))
            alone = bias_sums.column_sums(dy)
            shares = bias_sums.shares_of(dy)
            for needs in itertools.product((True, False), repeat=3):
                sums = parts if needs[0] or needs[1] else None
                summed = sums, shares if needs[2] else None
                found = bias_sums.bias_gradients(*summed, "apart", needs, dy)
                assert tuple(t is not None for t in found) == needs
                for t, oracle, summed in zip(found, expected, (rows, rows, m), strict=True):
                    if t is not None:
                        bound = oracle.abs() * torch.finfo(dtype).eps + summed * 2.0**-22
                        assert bool(((t - oracle).abs() <= bound).all())
                assert found[2] is None or torch.equal(found[2], alone)
            both = bias_sums.bias_gradients(parts, None, "up_gate", (True, False, False), dy)[0]
            assert both is not None
            apart = bias_sums.bias_gradients(parts, None, "apart", (True, True, False), dy)
            assert torch.equal(both, torch.cat([apart[1], apart[0]]))  # type: ignore[list-item]

    @pytest.mark.parametrize("m", [1, 15, 200, 2049, 5000])
    def test_shares_of_dy_beside_the_product_are_those_of_their_own_launch(self, m: int) -> None:
        for n, h in ((72, 264), (520, 2056), (1032, 128)):
            x, weights, biases, dy = _draw((m, 64, h, n), torch.bfloat16, "apart", "yes")
            wide = torch.full((m, n + 8), float("nan"), dtype=dy.dtype, device="cuda")
            wide[:, 8:] = dy
            pre: Any = reference.pre_activations(x, weights, biases)
            for needs in ((False,) * 3 + (True,) * 4, (True,) + (False,) * 5 + (True,)):
                for given in (dy, wide[:, 8:]):
                    found = backend.backward(given, pre, x, weights, biases, "silu", "apart", needs)
                    assert found[6] is not None
                    assert torch.equal(found[6], bias_sums.column_sums(given))

    def test_what_is_not_finite_stays_in_its_column(self) -> None:
        x, weights, biases, dy = _draw((300, 64, 200, 72), torch.float16, "apart", "yes")
        gate, up = reference.pre_activations(x, weights, biases)
        assert up is not None
        gate[137, 21] = float("nan")
        up[7, 100] = float("inf")
        needs: Any = (False,) * 4 + (True,) * 3
        grads = backend.backward(dy, (gate, up), x, weights, biases, "silu", "apart", needs)
        found = [(~torch.isfinite(t)).nonzero().flatten().tolist() for t in grads[4:]]  # type: ignore[union-attr]
        assert found == [[21, 100], [21], []]

    def test_addresses_that_are_not_aligned(self) -> None:
        x, weights, biases, _ = _draw((40, 64, 48, 24), torch.bfloat16, "apart", "yes")
        moved = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape)
        moved.copy_(x)
        y = backend.forward(x, weights, biases, "silu", "apart", False)[0]
        assert torch.equal(backend.forward(moved, weights, biases, "silu", "apart", False)[0], y)

    @pytest.mark.parametrize("order", ["apart", "gate_up", "up_gate"])
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_over_what_was_kept(self, sizes: tuple[int, int, int, int], order: str) -> None:
        x, weights, biases, dy = _draw(sizes, torch.bfloat16, order, "yes")
        _, *pre = backend.forward(x, weights, biases, "silu", order, True)
        needs: Any = (True, *(t is not None for t in (*weights, *biases)))
        given = x, weights, biases, "silu", order, needs
        plain = backend.backward(dy, tuple(pre), *given)
        kept = pre[0].clone()
        for a, b in zip(plain, backend.backward(dy, tuple(pre), *given, True), strict=True):
            assert a is b or torch.equal(a, b)  # type: ignore[arg-type]
        assert not torch.equal(pre[0], kept)

    def test_the_same_bit_for_bit(self) -> None:
        x, weights, biases, dy = _draw((1500, 512, 1032, 256), torch.bfloat16, "apart", "yes")
        needs: Any = (True,) * 7

        def run() -> list[Tensor]:
            y, *pre = backend.forward(x, weights, biases, "gelu", "apart", True)
            grads = backend.backward(dy, tuple(pre), x, weights, biases, "gelu", "apart", needs)
            return [y, *pre, *grads]

        first = run()
        for _ in range(300):
            for a, b in zip(first, run(), strict=True):
                assert torch.equal(a, b)
