"""Einsum: two operands and more, with and without an ellipsis."""

from __future__ import annotations

from typing import Any

from tests.support.models.tflite_cases import Case, random


def case_of(equation: str, *items: tuple[int, ...], **constants: Any) -> Case:
    """Operands x, z, t in turn, and then the constants."""
    named = dict(zip("xzt", items, strict=False))
    operands = ", ".join([*named, *constants])
    return Case(equation, f'y = Einsum<equation="{equation}">({operands})', named, constants)


CASES = [
    case_of("bij->bji", (3, 4)),
    case_of("bij->bi", (3, 4)),
    case_of("bij", (3, 4)),
    case_of("bij,bjk->bik", (3, 4), (4, 5)),
    case_of("bij, bjk -> bki", (3, 4), (4, 5)),
    case_of("bhid,bhjd->bhij", (2, 3, 4), (2, 5, 4)),
    case_of("bihd,bjhd->bhij", (3, 2, 4), (5, 2, 4)),
    case_of("bi,bi->b", (6,), (6,)),
    case_of("bi,bj->bij", (3,), (4,)),
    case_of("bi,bi->bi", (6,), (6,)),
    case_of("bij,bj->bij", (3, 4), (4,)),
    case_of("bij,bik,bil->bjkl", (3, 2), (3, 4), (3, 5)),
    case_of("bij,jk->bik", (3, 4), w=random(4, 5)),
    case_of("bid,hdk->bhik", (3, 4), w=random(2, 4, 5)),
    case_of("bhid,hde->bhie", (2, 3, 4), w=random(2, 4, 5)),
    case_of("...d,de->...e", (2, 3, 4), w=random(4, 5)),
    case_of("...ij,...jk->...ik", (2, 3, 4), w=random(1, 2, 4, 5)),
    case_of("b...j,...->b...j", (3, 4), w=random(3)),
    case_of("bj,i->bij", (4,), w=random(3)),
    case_of("bij,bkl->b", (3, 4), (2, 5)),
    case_of("bchw,c->bhw", (4, 3, 5), w=random(4)),
]
