"""Which recipes are built: those that are named, that the packages allow, and that are consented
to. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from freezer.errors import UsageError, expected_names, install_command
from freezer.freezing.recipes import EAGER, RECIPES, Recipe, is_exact
from freezer.spec import BAD_ACCURACY, consents


def select(
    names: Iterable[str],
    *,
    portable: bool,
    installed: Collection[str] | None = None,
    precision: Collection[str] = (),
) -> tuple[Recipe, ...]:
    """The recipes to build for a device class.

    Args:
        names: names of RECIPES, `eager`, `auto`, or `all`.
        portable: whether the device class is `portable`, for which `names` is ignored.
        installed: packages that builds for the class may use besides torch: `auto` and `all` leave
            out recipes that need others. None: all.
        precision: lower precisions that are consented to, and that the class has.

    Raises:
        UsageError: a name is unknown.
    """
    wanted = set(names)
    for name in wanted - set(RECIPES) - {"auto", "all", EAGER}:
        raise UsageError(
            f"unknown recipe {name!r}; {expected_names(name, ('auto', 'all', EAGER, *RECIPES))}"
        )
    selected = []
    for recipe in RECIPES.values():
        in_group = "all" in wanted or (recipe.auto and "auto" in wanted)
        can_build = installed is None or set(recipe.packages) <= set(installed)
        if not consents(recipe.precision, precision):
            continue
        if recipe.portable == portable and (
            portable or recipe.name in wanted or (in_group and can_build)
        ):
            selected.append(recipe)
    return tuple(selected)


def check_consented(names: Iterable[str], precision: Collection[str]) -> None:
    """Check that recipes of a lower precision that are named have consent.

    Raises:
        UsageError: one has not; code CP-ACCURACY.
    """
    for name in set(names) & set(RECIPES):
        needed = RECIPES[name].precision
        if not consents(needed, precision):
            raise UsageError(
                f"recipe {name!r} computes in {needed}, which changes answers; add `precision:"
                f" [{needed.replace('+', ', ')}]` and a budget (`accuracy:`)",
                code=BAD_ACCURACY,
            )


def check_used(names: Iterable[str], precision: Collection[str]) -> None:
    """Check that a consent to lower precision has a recipe.

    Raises:
        UsageError: it has none; code CP-ACCURACY.
    """
    wanted = set(names)
    lower = [name for name in wanted if not is_exact(name)]
    if precision and not lower and not wanted & {"auto", "all"}:
        raise UsageError(
            f"precision: none of the recipes {', '.join(sorted(wanted))} computes in"
            f" {' or '.join(precision)}; add `auto`, or one that does",
            code=BAD_ACCURACY,
        )


def left_out(
    names: Iterable[str], *, installed: Collection[str], precision: Collection[str] = ()
) -> str:
    """The recipes that `select` leaves out and the packages that they lack, for people; empty if
    there is none.
    """
    wanted = tuple(names)
    selected = select(wanted, portable=False, installed=installed, precision=precision)
    lines = []
    for recipe in select(wanted, portable=False, precision=precision):
        missing = [name for name in recipe.packages if name not in installed]
        if recipe not in selected:
            lines.append(f"{recipe.name} is left out, which needs `{install_command(*missing)}`")
    return "; ".join(lines)
