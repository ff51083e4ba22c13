"""Recipes: which captures and lowerings make a candidate, and with which settings.

May import: freezer.artifact and below. Imports no torch.
Read first: recipes.py.
"""

from freezer.freezing.recipes.inductor_settings import (
    BESIDE,
    REQUIRED,
)
from freezer.freezing.recipes.recipes import (
    EAGER,
    ENGINE_PACKAGES,
    KEPT_EAGER,
    RECIPES,
    CaptureName,
    Recipe,
    left_out,
    made_for,
    needs_torch_alone,
    own_toolchain,
    select,
)

__all__ = [
    "BESIDE",
    "EAGER",
    "ENGINE_PACKAGES",
    "KEPT_EAGER",
    "RECIPES",
    "REQUIRED",
    "CaptureName",
    "Recipe",
    "left_out",
    "made_for",
    "needs_torch_alone",
    "own_toolchain",
    "select",
]
