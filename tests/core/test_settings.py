"""Config: every option is checked where it is given."""

from __future__ import annotations

from typing import Any

import pytest

from fastlinear.core.errors import InputError
from fastlinear.core.settings import Config

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "eval"},
        {"mode": ["train"]},
        {"draws": "a"},
        {"draws": INF},
        {"draws": 2.0},
        {"draws": True},
        {"draws": 0},
        {"optimizer_steps": None},
        {"seed": "a"},
        {"time_budget_s": None},
        {"time_budget_s": "60"},
        {"time_budget_s": 0},
        {"time_budget_s": NAN},
        {"min_speedup": "fast"},
        {"min_speedup": INF},
        {"tune": "no"},
        {"rows": 64},
        {"rows": (0,)},
        {"rows": (1, 2.0)},
        {"rows": "64"},
        {"graphs": 1},
        {"compile": None},
        {"allow_fast_matmul": "yes"},
        {"families": "linear_act"},
        {"families": (1,)},
        {"families": 5},
        {"backends": "onednn"},
        {"backends": {"linear_act": 1}},
        {"backends": None},
    ],
)
def test_options_of_the_wrong_kind(given: dict[str, Any]) -> None:
    ((name, _),) = given.items()
    with pytest.raises(InputError, match=f"^Config: expected .*{name}.*; received {name}="):
        Config(**given)


def test_options_of_the_right_kind() -> None:
    config = Config(time_budget_s=INF, families=("mlp",), backends={"mlp": "eager"}, min_speedup=2)
    assert config.families == ("mlp",)


def test_rows_are_tuned_for_or_not() -> None:
    assert Config(rows=(1, 64)).rows == (1, 64)
    with pytest.raises(InputError, match="tune=True where rows are to be tuned for"):
        Config(rows=(1,), tune=False)
