"""Which forwards may be replaced by their trace, and which no guard can make safe.

A trace keeps every value that is no tensor as it was. Simple values and functions can be watched
(see ``rewrite.guard``); a forward that depends on anything else is refused.
"""

from __future__ import annotations

import dis
import inspect
import re
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.overrides import get_testing_overrides

from fastlinear.core.global_names import GENERATOR, global_names, own_codes
from fastlinear.profile.effects import class_forward, functions_of, has_state
from fastlinear.profile.graph import TENSOR, Observed
from fastlinear.profile.reached import Reached, function_in, is_torchs, reached

SIMPLE = (bool, int, float, str, type(None))
"""Types whose values a guard can compare."""
SEQUENCES = (list, tuple)
"""Types whose values it can compare item by item."""
_SIMPLE = frozenset(SIMPLE)
# Names whose value may differ from call to call and that tracing would freeze, or lose. Not len: of
# a tensor torch.fx refuses it, and what else can be asked for its length is watched or refused.
_UNTRACEABLE_TEXT = """
    isinstance hasattr type id print is_tensor is_grad_enabled is_autocast_enabled
    is_autocast_cpu_enabled is_inference_mode_enabled is_compiling is_dynamo_compiling
    random environ requires_grad grad setattr __dict__ vars globals requires_grad_ data
    grad_fn children named_children modules named_modules parameters named_parameters
    buffers named_buffers get_default_dtype checkpoint checkpoint_sequential
    _gradient_checkpointing_func
"""
_UNTRACEABLE = frozenset(_UNTRACEABLE_TEXT.split())
# functions of torch's that tell of settings, where they take no tensor
_ASKS = re.compile("_?(is|are|has|get|current|device_count|initial_seed)(_|$)")
_MOVED = "move the block to the code that calls the module, or what it holds to a module of its own"
_DONE_OUTSIDE = "do that in the code that calls the module"
# instruction → what the user's code does, with the name it does it to, and what to write instead
_UNTRACEABLE_OPS = {
    "STORE_ATTR": ("sets the attribute {}", _DONE_OUTSIDE),
    "DELETE_ATTR": ("deletes the attribute {}", _DONE_OUTSIDE),
    "STORE_SUBSCR": ("writes to an item of a list, dict or tensor", _DONE_OUTSIDE),
    "DELETE_SUBSCR": ("deletes an item of a list or dict", _DONE_OUTSIDE),
    "STORE_GLOBAL": ("sets the global {}", _DONE_OUTSIDE),
    "DELETE_GLOBAL": ("deletes the global {}", _DONE_OUTSIDE),
    "STORE_DEREF": ("sets {}, which an inner function reads", "give it as an argument"),
    "BEFORE_WITH": ("has a with block", _MOVED),
    "SETUP_WITH": ("has a with block", _MOVED),
    "WITH_EXCEPT_START": ("has a with block", _MOVED),
    "IMPORT_NAME": ("imports {}", "import it at the top of the file"),
    "YIELD_VALUE": ("yields its results", "return them"),
}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def why_not(parent: nn.Module) -> str | None:
    """Why the forward of this module's class must not be replaced by its trace, or None."""
    forward: Any = class_forward(parent)
    if not isinstance(forward, FunctionType) or inspect.unwrap(forward) is not forward:
        return "is wrapped by a decorator"
    if isinstance(parent, _CONTAINERS):
        return "belongs to a container, whose members may change"
    code = reached(parent, forward)
    for module in code.modules.values():
        if _looks_up_otherwise(type(module)):
            return f"reads attributes of {type(module).__qualname__}, which looks them up itself"
    for function in code.functions:
        if set(function.__code__.co_freevars) - {"__class__"}:
            return "reads variables of an enclosing function"
        reasons = (*map(_why_not_code, own_codes(function.__code__)), _why_not_global(function))
        reason = next((r for r in reasons if r is not None), None)
        if reason is not None:
            return reason
    return _why_not_state(code)


def _looks_up_otherwise(kind: type) -> bool:
    """Whether it finds attributes by code of its own."""
    own: Any = kind
    plain: Any = nn.Module
    if is_torchs(kind):
        return False
    return (
        own.__getattr__ is not plain.__getattr__
        or own.__getattribute__ is not plain.__getattribute__
    )


def is_straight(parent: nn.Module) -> bool:
    """Whether its forward, its methods and helpers have no branch, so that they do the same
    whatever the values and sizes of what they are given."""
    functions = functions_of(parent, class_forward(parent))
    held = [v for v in vars(parent).values() if isinstance(v, FunctionType)]
    if any(not str(v.__module__).startswith("torch.") for v in held):
        return False
    steps = (
        step.opname
        for function in functions
        for code in own_codes(function.__code__)
        for step in dis.get_instructions(code)
    )
    return not any("JUMP" in name and "_IF_" in name for name in steps)


# What inputs and weights that are tried do not show: where gradients stop, what happens to numbers
# beyond a bound, to rows beyond a number, or to another dtype.
_UNSEEN = {
    word
    for line in (
        "bfloat16 clamp clamp_ clamp_max clamp_min clip clip_ data detach detach_ double",
        "enable_grad float fmax fmin half hardtanh hardtanh_ inference_mode isfinite isinf",
        "isnan item masked_fill masked_fill_ masked_select max maximum min minimum nan_to_num",
        "nan_to_num_ narrow no_grad register_hook relu6 requires_grad_ set_grad_enabled",
        "threshold threshold_ to tolist type type_as where",
    )
    for word in line.split()
}


def unseen_by_trying(parent: nn.Module) -> str | None:
    """What in its forward, methods and helpers cannot be told from its results, or None."""
    for function in functions_of(parent, class_forward(parent)):
        for code in own_codes(function.__code__):
            names = sorted(set(code.co_names) & _UNSEEN)
            if names:
                return f"uses {names[0]}, of which trying it shows too little"
            if _slices_by_numbers(code):
                return "takes a slice whose bounds trying it does not show"
    return None


def _slices_by_numbers(code: CodeType) -> bool:
    """Whether a slice has a bound that is not computed where it stands; ``x[:]`` has none."""
    steps = [s for s in dis.get_instructions(code) if s.opname not in ("CACHE", "EXTENDED_ARG")]
    for i, step in enumerate(steps):
        if step.opname == "LOAD_CONST" and isinstance(step.argval, slice):
            if step.argval != slice(None):
                return True
        elif step.opname in ("BUILD_SLICE", "BINARY_SLICE"):
            count = step.arg if step.opname == "BUILD_SLICE" else 2
            bounds = steps[max(0, i - (count or 2)) : i]
            whole = all(b.opname == "LOAD_CONST" and b.argval is None for b in bounds)
            if not whole and bounds[-1].opname != "BINARY_OP":
                return True
    return False


def why_not_arguments(observed: Observed) -> str | None:
    """Why a trace for these arguments could not be guarded, or None."""
    args, kwargs = observed.arguments()
    for value in (*args, *kwargs.values()):
        if value is TENSOR or type(value) in SIMPLE:
            continue
        if type(value) not in SEQUENCES:
            return f"takes an argument of type {type(value).__qualname__}"
        if not value or any(v is not TENSOR for v in value):
            return f"takes a {type(value).__qualname__} that holds more than tensors"
    return None


def _why_not_code(code: CodeType) -> str | None:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "YIELD_VALUE" and code.co_name == GENERATOR:
            continue  # tracing consumes it as a call does
        if instruction.opname == "STORE_DEREF" and instruction.argval in code.co_cellvars:
            continue  # a local variable that a comprehension reads, before Python 3.12
        if instruction.opname in _UNTRACEABLE_OPS:
            what, instead = _UNTRACEABLE_OPS[instruction.opname]
            said = what.format(instruction.argval)
            return (
                f"{said}{_line(instruction)}, which a rewritten forward would leave out; {instead}"
            )
    frozen = sorted(set(code.co_names) & _UNTRACEABLE)
    steps = list(dis.get_instructions(code))
    if frozen:
        where = next((_line(step) for step in steps if step.argval == frozen[0]), "")
        return f"uses {frozen[0]}{where}, which a rewritten forward would keep as it is in one call"
    handlers = [step for step in steps if step.opname == "PUSH_EXC_INFO"]
    if handlers:  # a comprehension's own handler pushes nothing
        return f"has a with or try block, which a rewritten forward would leave out; {_MOVED}"
    nested = [c for c in code.co_consts if isinstance(c, CodeType) and c not in own_codes(code)]
    if nested:
        name = "a lambda" if nested[0].co_name == "<lambda>" else nested[0].co_name
        return f"defines {name} inside (line {nested[0].co_firstlineno}); define it outside forward"
    return None


def _line(step: dis.Instruction) -> str:
    line = None if step.positions is None else step.positions.lineno
    return "" if line is None else f" (line {line})"


def _why_not_state(code: Reached) -> str | None:
    for name in code.names:
        if name in ("_modules", "_parameters", "_buffers"):
            return f"reads self.{name}"
    held = (
        (path, name, vars(module)[name])
        for path, module in code.modules.items()
        for name in code.names
        if name in vars(module) and not hasattr(nn.Module, name)
    )
    for path, name, value in (*held, *code.of_classes()):
        if not watchable(value) and function_in(value) is None:
            where = ".".join(("self", *path, name))
            return f"reads {where} ({type(value).__name__}), which cannot be watched"
    for _, name, value in code.outside():
        if (
            is_function(value)
            and is_torchs(value)
            and _ASKS.match(name)
            and not _overridable(value)
        ):
            return f"calls {name}, which a rewritten forward would keep as it is in one call"
    return None


def _overridable(function: Any) -> bool:
    """Whether it is a function of tensors."""
    return function in get_testing_overrides()


def _why_not_global(function: FunctionType) -> str | None:
    for name in global_names(function.__code__):
        outside = function.__globals__.get(name)
        if has_state(outside):
            return f"reads the global {name} ({type(outside).__name__}), which cannot be watched"
    return None


def watchable(value: Any) -> bool:
    """Whether a guard can tell that this value has changed."""
    if type(value) in SEQUENCES:
        return all(type(v) in SIMPLE for v in value)
    return type(value) in SIMPLE or is_function(value)


def as_it_is(value: Any) -> Any:
    """A watchable value as it is now: a list may be changed in place later."""
    return list(value) if type(value) is list else value


def is_function(value: Any) -> bool:
    """Whether it is a plain function, of Python or of C."""
    return isinstance(value, FunctionType | BuiltinFunctionType)


def same(a: Any, b: Any) -> bool:
    """Whether two values are the same object or equal simple values, or rows of such, of one
    type."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is MethodType:
        return bool(a == b)
    if type(a) in SEQUENCES:
        kinds = [*map(type, a)]
        return kinds == [*map(type, b)] and _SIMPLE.issuperset(kinds) and bool(a == b)
    return type(a) in SIMPLE and bool(a == b)
