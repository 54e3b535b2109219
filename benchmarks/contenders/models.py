"""The work and the contenders of whole models: plain, compiled, and rewritten by fastlinear."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.case import Case
from benchmarks.harness.peer import (
    OURS,
    Peer,
    cuda_only,
    no_compiler,
    no_reduce_overhead,
)
from benchmarks.harness.work import AnyWork, Unit
from fastlinear.core.cost import Cost
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.settings import Config
from fastlinear.rewrite import Result, optimize_

_BUDGET_S = 40.0


@dataclass(frozen=True)
class ModelWork(AnyWork):
    """One model and one input; a unit of work is one forward.

    Attributes:
        case: what is measured.
        model: in eval mode, on the device, in the case's dtype.
        inputs: keyword arguments of the forward.
        budget_s: seconds that ``optimize_`` may take for what can be left out.
        stacks: one entry, so that nothing rotates: a model's weights exceed the caches by far.
        cold: False; a model runs over and over.
        result: what ``optimize_`` did, once our contender is built.
        rewritten: the model it left.
        whole: what it did where CUDA graphs or compiling were asked for as well.
    """

    case: Case
    model: nn.Module
    inputs: dict[str, Tensor]
    budget_s: float = _BUDGET_S
    stacks: tuple[None, ...] = (None,)
    cold: bool = False
    result: list[Result] = field(default_factory=list)
    rewritten: list[nn.Module] = field(default_factory=list)
    whole: list[Result] = field(default_factory=list)

    @property
    def train(self) -> bool:
        """Whether it is optimized for training."""
        return self.case.needs_grad

    def given(self) -> Any:
        """The inputs, as ``optimize_`` takes them."""
        return dict(self.inputs)

    def unit(self, model: Callable[..., Any]) -> Unit:
        """One forward of a model."""
        return lambda _: (model(**self.inputs)[0],)

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What a copy of the model gives in ``dtype``; the oracle in float64."""
        model = copy.deepcopy(self.model).to(dtype)
        inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.inputs.items()}
        with self.mode():
            return (model(**inputs)[0],)

    def cost(self) -> Cost:
        """Flops of all matrix products as torch counts them; every parameter read once."""
        from torch.utils.flop_counter import FlopCounterMode

        with self.mode(), FlopCounterMode(display=False) as counter:
            y = self.model(**self.inputs)[0]
        moved = [*self.model.parameters(), *self.inputs.values(), y]
        return Cost(counter.get_total_flops(), sum(t.numel() * t.element_size() for t in moved))

    def outer(self) -> dict[str, Tensor]:
        """The inputs."""
        return self.inputs

    def chosen(self) -> dict[str, str]:
        """How many sites ended how."""
        return {k: str(v) for r in self.result for k, v in r.summary().items()}


def _gpt2(hf: Any, layers: int) -> Any:
    return hf.GPT2Model(hf.GPT2Config(n_layer=layers, use_cache=False))


def _bert(hf: Any, layers: int) -> Any:
    return hf.BertModel(hf.BertConfig(num_hidden_layers=layers))


def _vit(hf: Any, layers: int) -> Any:
    return hf.ViTModel(hf.ViTConfig(num_hidden_layers=layers))


def _smollm(hf: Any, layers: int) -> Any:
    """Llama's architecture with the sizes of SmolLM-135M: a gated MLP with silu, gate and up
    apart."""
    config = hf.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        use_cache=False,
    )
    return hf.LlamaModel(config)


def _t5(hf: Any, layers: int) -> Any:
    """The encoder of T5 v1.1 base: a gated MLP with gelu_tanh."""
    config = hf.T5Config(
        d_model=768,
        d_kv=64,
        d_ff=2048,
        num_heads=12,
        num_layers=layers,
        feed_forward_proj="gated-gelu",
        vocab_size=32128,
    )
    return hf.T5EncoderModel(config)


_MODELS = {"gpt2": _gpt2, "bert": _bert, "vit": _vit, "smollm": _smollm, "t5": _t5}


def make_work(case: Case, device: torch.device) -> ModelWork:
    """Build the model of a case with random weights. Needs the extra ``[models]``."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers as hf

    name, layers = case.option("model"), case.dim("L")
    batch, tokens = case.dim("B"), case.dim("T")
    generator = torch.Generator().manual_seed(case.seed)
    torch.manual_seed(case.seed)
    model: nn.Module = _MODELS[name](hf, layers)
    dtype = FLOAT_DTYPES[case.dtype]
    model = model.eval().to(device=device, dtype=dtype)
    if name == "vit":
        pixels = torch.randn(batch, 3, 224, 224, generator=generator)
        inputs = {"pixel_values": pixels.to(device=device, dtype=dtype)}
    else:
        ids = torch.randint(30000, (batch, tokens), generator=generator)
        inputs = {"input_ids": ids.to(device)}
    return ModelWork(case, model, inputs)


def peers(case: Case) -> tuple[Peer, ...]:
    """Eager, ``torch.compile`` in its modes, fastlinear, what it rewrote compiled, and what it
    makes of the model when CUDA graphs and compiling are asked for."""
    frozen = {"max_autotune": True, "freezing": True} if case.device == "cpu" else None
    tuned: dict[str, Any] = {"options": frozen} if frozen else {"mode": "max-autotune"}

    return (
        Peer("eager", lambda w: w.unit(w.model)),
        Peer("compile", lambda w: w.unit(_compiled(w.model)), no_compiler, precompile=True),
        Peer(
            "compile_reduce_overhead",
            lambda w: w.unit(_reduced(w.model)),
            no_reduce_overhead,
            ("wall",),
            precompile=True,
        ),
        Peer("compile_max_autotune", lambda w: w.unit(_compiled(w.model, **tuned)), no_compiler),
        Peer(OURS, lambda w: w.unit(_optimized(w))),
        Peer(f"{OURS}_graphs", lambda w: w.unit(_optimized(w, graphs=True)), cuda_only, ("wall",)),
        Peer(f"{OURS}_compile", lambda w: w.unit(_compiled(_optimized(w))), no_compiler),
        Peer(
            f"{OURS}_asked",
            lambda w: w.unit(_optimized(w, graphs=True, compile=True)),
            no_compiler,
            ("wall",),
        ),
        Peer(
            f"{OURS}_reduce_overhead",
            lambda w: w.unit(_reduced(_optimized(w))),
            no_reduce_overhead,
            ("wall",),
        ),
    )


def _compiled(model: nn.Module, **how: Any) -> Callable[..., Any]:
    return torch.compile(model, dynamic=False, **how)


@dataclass(frozen=True)
class _Reduced:
    """A model replayed as CUDA graphs, each call of which is a step of its own."""

    compiled: Any

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the model."""
        return iter(self.compiled.parameters())

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return self.compiled(*args, **inputs)


def _reduced(model: nn.Module) -> Callable[..., Any]:
    return _Reduced(_compiled(model, mode="reduce-overhead"))


def _optimized(work: ModelWork, *, graphs: bool = False, compile: bool = False) -> nn.Module:
    """A rewritten copy of the model; the plain one is made once, before any other, and tunes for
    all of them."""
    plain = not graphs and not compile
    if plain and work.rewritten:
        return work.rewritten[0]
    if not plain:
        _optimized(work)
    model = copy.deepcopy(work.model)
    config = Config(
        mode="train" if work.train else "inference",
        time_budget_s=work.budget_s,
        graphs=graphs,
        compile=compile,
        tune=plain,
    )
    result = optimize_(model, work.given(), config=config)
    if plain:
        work.rewritten.append(model)
        work.result.append(result)
    else:
        work.whole.append(result)
    return model
