"""RECIPES: how artifacts are made. A recipe names a capture, a lowering and its settings. Imports no torch.

A recipe's name and settings are part of a build's key: change what a recipe does, and change a setting with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from freezer.errors import UsageError

CaptureName = Literal["export", "trace", "script", "as-is"]
LoweringName = Literal["inductor", "torchscript", "exported"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How an artifact is made.

    Attributes:
        ways: pairs of a capture and the lowering that takes its graph, in the order they are tried.
        settings: of the lowerings.
        portable: made for the device class `portable`, and only for it.
        keeps_state: whether a model that changes itself answers as eager does; False makes such a model a refusal.
        by_thread: whether its payloads are laid out for one thread count.
        by_shape: whether it makes a payload of its own for the first point, beside the one for all sizes.
    """

    name: str
    ways: tuple[tuple[CaptureName, LoweringName], ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    portable: bool = False
    keeps_state: bool = True
    by_thread: bool = False
    by_shape: bool = False


EAGER = "eager"
"""The baseline and always an entrant: the source model itself, never an artifact."""

RECIPES: Mapping[str, Recipe] = {
    "torchscript-frozen": Recipe(
        name="torchscript-frozen",
        ways=(("as-is", "torchscript"), ("trace", "torchscript"), ("script", "torchscript")),
        settings={"freeze": True, "optimize_numerics": True},
    ),
    "inductor-frozen": Recipe(
        name="inductor-frozen",
        ways=(("export", "inductor"),),
        settings={"freezing": True},
        keeps_state=False,
        by_thread=True,
        by_shape=True,
    ),
    "portable": Recipe(
        name="portable",
        ways=(("export", "exported"), ("as-is", "torchscript"), ("trace", "torchscript"), ("script", "torchscript")),
        settings={"freeze": False},
        portable=True,
    ),
}

LOWERINGS: Mapping[LoweringName, str] = {
    "torchscript": "freezer.lowering.torchscript",
    "inductor": "freezer.lowering.inductor",
    "exported": "freezer.lowering.exported",
}
"""The module that opens each kind of payload, and builds it."""


def select(names: Iterable[str], *, portable: bool) -> tuple[Recipe, ...]:
    """The recipes to build for a device class.

    Args:
        names: of RECIPES, `eager`, or `auto` for all.
        portable: for the class `portable`, whose recipes are taken whatever is named; or for any other.

    Raises:
        UsageError: a name is unknown.
    """
    wanted = set(names)
    for name in wanted - set(RECIPES) - {"auto", EAGER}:
        raise UsageError(f"unknown recipe {name!r}; expected auto, {EAGER}, {', '.join(RECIPES)}")
    if portable:
        return tuple(recipe for recipe in RECIPES.values() if recipe.portable)
    return tuple(r for r in RECIPES.values() if not r.portable and ("auto" in wanted or r.name in wanted))
