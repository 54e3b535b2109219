"""What tests draw of a family: every two values meet, the same for the same seed."""

from __future__ import annotations

from itertools import combinations, islice, product
from random import Random

from fastlinear.dispatch.backend import families
from fastlinear.dispatch.space import _pairwise

COLUMNS = {"sizes": range(7), "activation": range(13), "x": range(3), "bias": range(2)}


def test_any_two_values_meet_soon() -> None:
    for seed in range(5):
        rows = list(islice(_pairwise(COLUMNS, Random(seed)), 7 * 13))
        for a, b in combinations(COLUMNS, 2):
            assert {(r[a], r[b]) for r in rows} == set(product(COLUMNS[a], COLUMNS[b]))


def test_every_value_of_every_family_is_drawn() -> None:
    for fam in families().values():
        assert fam.space is not None
        for piece, device in product(fam.pieces, ("cpu", "cuda")):
            drawn = list(fam.space.draw(piece, "float32", device))
            assert drawn == list(fam.space.draw(piece, "float32", device))
            assert set(drawn) != set(fam.space.draw(piece, "float32", device, seed=1))
            assert all((p.piece, p.device, p.family) == (piece, device, fam.name) for p in drawn)
            narrowed = fam.space.narrowed.get(piece, {})
            acts = {**fam.space.options, **narrowed}["activation"]
            assert {p.option("activation") for p in drawn} == set(acts)
            assert all(p.needs_grad for p in drawn) or piece == "forward"
