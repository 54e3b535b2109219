"""Models and tensors that other libraries have taken over: wrappers, shards, weights of no memory.

Recognised by the names of classes, so that nothing is imported to look for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""The tensor types whose memory is what it seems to be."""

_MODULES = {
    "DistributedDataParallel": "DistributedDataParallel averages gradients between processes",
    "FullyShardedDataParallel": "FullyShardedDataParallel (FSDP1) gathers parameters by hooks",
    "FSDPModule": "fully_shard (FSDP2) gathers parameters by hooks",
    "DeepSpeedEngine": "DeepSpeed's engine takes the steps",
}
_MANAGED = "_is_fsdp_managed_module"  # of modules inside FSDP1 and FSDP2
_TENSORS = {
    "DTensor": "sharded over processes",
    "ShardedTensor": "sharded over processes",
    "AsyncCollectiveTensor": "still on its way between processes",
    "FlatParameter": "sharded over processes",
    "FakeTensor": "without values",
    "FunctionalTensor": "of a trace, without values",
}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def distributed_wrapper(module: nn.Module) -> str | None:
    """What another library does with this one module between processes, in words, or None."""
    for cls in type(module).__mro__:
        if cls.__name__ in _MODULES:
            return _MODULES[cls.__name__]
    if getattr(module, _MANAGED, False):
        return "FSDP manages its parameters"
    for hooks in _HOOKS:
        for hook in getattr(module, hooks, {}).values():
            home = str(getattr(hook, "__module__", ""))
            if home.startswith("torch.distributed.") and "checkpoint" not in home:
                return f"a hook of {home}"
    return None


def foreign_kind(t: Tensor) -> str | None:
    """What a tensor is whose values are not on this machine or nowhere, in words, or None.

    Tensors inside a wrapper subclass (a quantized weight, say) count as well.
    """
    for part in (t, *inner_tensors(t)):
        for cls in type(part).__mro__:
            if cls.__name__ in _TENSORS and cls.__module__.startswith("torch."):
                return f"a {cls.__name__}, {_TENSORS[cls.__name__]}"
        if hasattr(part, "ds_id"):
            return "a parameter partitioned by DeepSpeed's ZeRO"
    return None


def without_values(t: Tensor) -> bool:
    """Whether nothing can be read of a tensor but its shape: it is on meta, or fake."""
    return t.is_meta or any(cls.__name__ == "FakeTensor" for cls in type(t).__mro__)


def inner_tensors(t: Any) -> Iterator[Tensor]:
    """The tensors that a wrapper subclass keeps its values in, nested ones too; of any other
    tensor none."""
    for _, _, inner in inner_places(t):
        yield inner


def inner_places(t: Any) -> Iterator[tuple[Any, str, Tensor]]:
    """The same with what holds each: (holder, attribute, tensor)."""
    if not is_traceable_wrapper_subclass(t):
        return
    for name in t.__tensor_flatten__()[0]:
        inner = getattr(t, name)
        yield t, name, inner
        yield from inner_places(inner)
