"""RECIPES: how artifacts are made. A recipe names a capture, a lowering and its settings. Imports no torch.

A recipe's name and settings are part of a build's key: change what a recipe does, and change a setting with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from freezer.artifact.manifest import PayloadKind
from freezer.errors import UsageError
from freezer.freezing.recipes.inductor_settings import CUDA, recipe_settings

CaptureName = Literal["export", "export-strict", "convert", "trace", "script", "as-is"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How an artifact is made.

    Attributes:
        ways: pairs of a capture and the lowering that takes its graph, in the order they are tried.
        settings: of the lowerings.
        portable: made for the device class `portable`, and only for it.
        keeps_state: whether a model that changes itself answers as eager does; False makes such a model a refusal.
        by_thread: whether its payloads are laid out for one thread count, so that each count needs payloads of its own. The others
            run with any; what `torchscript-optimized` packs it packs at load, for the count that serves.
        by_shape: whether a payload for one point is faster there than the one for all sizes, so that each point that the entry
            names gets one besides. The others make one payload for all.
        auto: whether `auto` takes it; the others are slower to build or seldom win, and must be named, or `all`.
    """

    name: str
    ways: tuple[tuple[CaptureName, PayloadKind], ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    portable: bool = False
    keeps_state: bool = True
    by_thread: bool = False
    by_shape: bool = False
    auto: bool = True


EAGER = "eager"
"""The baseline and always an entrant: the source model itself, never an artifact."""

_TORCHSCRIPT: tuple[tuple[CaptureName, PayloadKind], ...] = (
    ("as-is", "torchscript"),
    ("trace", "torchscript"),
    ("script", "torchscript"),
)
_EXPORT: tuple[CaptureName, ...] = ("export", "export-strict", "convert")


def _torchscript(name: str, *, optimize_numerics: bool = True, optimize_for_inference: bool = False, auto: bool = True) -> Recipe:
    settings = {"freeze": True, "optimize_numerics": optimize_numerics, "optimize_for_inference": optimize_for_inference}
    return Recipe(name=name, ways=_TORCHSCRIPT, settings=settings, auto=auto)


def _inductor(name: str, *, weight_prepack: bool = True, max_autotune: bool = False, auto: bool = True) -> Recipe:
    return Recipe(
        name=name,
        ways=tuple((capture, "inductor") for capture in _EXPORT),
        settings=recipe_settings(weight_prepack=weight_prepack, max_autotune=max_autotune),
        keeps_state=False,
        by_thread=True,
        by_shape=True,
        auto=auto,
    )


RECIPES: Mapping[str, Recipe] = {
    "torchscript-frozen": _torchscript("torchscript-frozen"),
    "torchscript-exact": _torchscript("torchscript-exact", optimize_numerics=False, auto=False),
    "torchscript-optimized": _torchscript("torchscript-optimized", optimize_for_inference=True),
    "inductor-frozen": _inductor("inductor-frozen"),
    "inductor-unpacked": _inductor("inductor-unpacked", weight_prepack=False, auto=False),
    "inductor-max-autotune": _inductor("inductor-max-autotune", max_autotune=True, auto=False),
    "portable": Recipe(
        name="portable",
        ways=(("export", "exported"), ("export-strict", "exported"), *_TORCHSCRIPT),
        settings={"freeze": False},
        portable=True,
    ),
}

KEPT_EAGER = Recipe(
    name="captured",
    ways=(("export", "exported"), ("export-strict", "exported"), *_TORCHSCRIPT),
    settings={"freeze": False},
    auto=False,
)
"""What serves a class for GPUs where nothing beats eager: the captured program, unfrozen, on that device. No entrant: `freeze` and
campaigns make it of a model whose verdict is `kept-eager`."""

PRECISION: Mapping[str, bool] = {"tf32": False, "reduced_precision_reductions": False}
"""What a GPU may do to be faster and less exact: multiply float32 in TF32, and sum what is in half precision in half precision.
Both are off for builds, judges and calls (runtime/precision.py)."""


def made_for(recipe: Recipe, kind: str) -> Recipe:
    """A recipe as it is for a kind of device class: for a GPU it says how exact it is, and what is laid out for no thread count.

    Args:
        recipe: of RECIPES, or KEPT_EAGER.
        kind: of DeviceClass.
    """
    if kind != "cuda":
        return recipe
    settings: dict[str, Any] = {**recipe.settings, "precision": dict(PRECISION)}
    if "inductor" in settings:
        settings["inductor"] = {**settings["inductor"], **CUDA}
    return replace(recipe, settings=settings, by_thread=False)


def select(names: Iterable[str], *, portable: bool) -> tuple[Recipe, ...]:
    """The recipes to build for a device class.

    Args:
        names: of RECIPES, `eager`, `auto` for those that are worth a try on any model, or `all`.
        portable: for the class `portable`, whose recipes are taken whatever is named; or for any other.

    Raises:
        UsageError: a name is unknown.
    """
    wanted = set(names)
    for name in wanted - set(RECIPES) - {"auto", "all", EAGER}:
        raise UsageError(f"unknown recipe {name!r}; expected auto, all, {EAGER}, {', '.join(RECIPES)}")
    if portable:
        return tuple(recipe for recipe in RECIPES.values() if recipe.portable)
    return tuple(
        recipe
        for recipe in RECIPES.values()
        if not recipe.portable and ("all" in wanted or (recipe.auto and "auto" in wanted) or recipe.name in wanted)
    )
