"""The user's source line of a failure, and remedies for known messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from string import Formatter

import pytest
import torch
from torch import Tensor
from torch.jit.frontend import NotSupportedError

from freezer.freezing.diagnostics.messages import REMEDIES, explain
from freezer.runtime.loaders import torchscript_deprecations_silenced


def test_remedies_use_only_groups_of_their_patterns() -> None:
    for pattern, means, remedy in (known for table in REMEDIES.values() for known in table):
        used = {name for text in (means, remedy) for _, name, _, _ in Formatter().parse(text)}
        assert used - {None} <= set(re.compile(pattern).groupindex), pattern


def untyped(x: Tensor, times=2):  # type: ignore[no-untyped-def]
    return x * times


def keywords(x: Tensor, **more: Tensor) -> Tensor:
    return x * more["by"]


def two_types(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        scale = x
        x = x + 1
    else:
        scale = 2  # type: ignore[assignment]
    return x * scale


@pytest.mark.parametrize(
    ("function", "means"),
    [
        (untyped, "the parameter 'times' has no type"),
        (keywords, "takes *args, **kwargs"),
        (two_types, "the variable 'scale' is Tensor in one branch and int in the other"),
    ],
)
def test_refusal_of_torch_jit_script_is_explained(
    function: Callable[..., Tensor], means: str
) -> None:
    with (
        torchscript_deprecations_silenced(),
        pytest.raises((RuntimeError, NotSupportedError)) as caught,
    ):
        torch.jit.script(function)
    found = explain(str(caught.value), "script")
    assert found is not None
    assert means in found.means
