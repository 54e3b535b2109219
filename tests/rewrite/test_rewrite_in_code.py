"""Names of parts as code: what is written in advice is what reaches the part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastlinear.rewrite.in_code import in_code, in_code_together


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(4))


class Odd(nn.Module):
    """Parts whose names no attribute access can spell."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", Scale())
        self.add_module("class", Scale())
        self.add_module("a-b", Scale())
        self.register_parameter("1", nn.Parameter(torch.ones(4)))
        self.register_buffer("2", torch.ones(4))
        self.kept = nn.ParameterList([torch.ones(4), torch.ones(4)])
        self.named = nn.ParameterDict({"x": torch.ones(4), "0": torch.ones(4)})
        self.heads = nn.ModuleDict({"left": Scale(), "3": Scale(), "keys ": Scale()})
        self.blocks = nn.ModuleList([nn.Sequential(Scale(), nn.Linear(4, 4)) for _ in range(3)])


def every(model: nn.Module) -> list[str]:
    parts = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
    return [name for name, _ in parts]


def part(model: nn.Module, name: str) -> object:
    holder: object = model
    for piece in name.split(".") if name else ():
        holder = getattr(holder, piece)
    return holder


@pytest.mark.parametrize("make", [Odd, lambda: nn.Sequential(Odd(), Scale())])
def test_every_name_is_code_that_reaches_it(make) -> None:
    model = make()
    for name in every(model):
        assert eval(in_code(model, name), {"model": model}) is part(model, name), name


def test_it_reads_as_people_write_it() -> None:
    model = nn.Sequential(Odd())
    assert in_code(model, "") == "model"
    assert in_code(model, "0.blocks.2.0.gamma") == "model[0].blocks[2][0].gamma"
    assert in_code(model, "0.heads.left.gamma") == "model[0].heads['left'].gamma"
    assert in_code(model, "0.kept.1") == "model[0].kept[1]"
    assert in_code(model, "0.1", "m") == "m[0].get_parameter('1')"


def test_names_are_places_only_where_they_are_in_order() -> None:
    from collections import OrderedDict

    model = nn.Sequential(OrderedDict([("1", Scale()), ("0", Scale())]))
    for name in ("0.gamma", "1.gamma"):
        assert eval(in_code(model, name), {"model": model}) is part(model, name)


@pytest.mark.parametrize(
    ("names", "written"),
    [
        (("blocks.0", "blocks.1", "blocks.2"), "model.blocks"),
        (("blocks.0.1", "blocks.1.1", "blocks.2.1"), "[m[1] for m in model.blocks]"),
        (("blocks.0.0", "blocks.1.0"), "[model.blocks[0][0], model.blocks[1][0]]"),
        (("blocks.0.0", "blocks.1.1", "blocks.2.0"), None),
        (("blocks.1.1", "blocks.0.1", "blocks.2.1"), None),
        (("heads.left", "heads.3", "heads.keys "), None),
    ],
)
def test_modules_together(names: tuple[str, ...], written: str | None) -> None:
    model = Odd()
    text = in_code_together(model, names)
    assert written is None or text == written
    assert [*eval(text, {"model": model})] == [part(model, name) for name in names]


def test_the_whole_model_is_a_list_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert in_code_together(model, ("0", "1")) == "model"
    assert in_code_together(nn.Sequential(*model, nn.Tanh()), ("0", "1")) == "[model[0], model[1]]"
