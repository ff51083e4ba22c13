"""The user's source line of a failure, and remedies for known messages."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from string import Formatter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.jit.frontend import NotSupportedError

from freezer.freezing.diagnostics.messages import REMEDIES, explain
from freezer.freezing.diagnostics.source_lines import raised_at, warned_at
from freezer.runtime.loaders import torchscript_deprecations_silenced
from tests.support.lines import place_of
from tests.support.steps import random_inputs

X = random_inputs(2, 4)


def deep(x: Tensor) -> Tensor:
    return nn.functional.linear(x, torch.zeros(3, 5))


def test_raised_at_follows_causes() -> None:
    def outer() -> None:
        try:
            deep(X)
        except RuntimeError as error:
            raise ValueError("again") from error

    with pytest.raises(ValueError, match="again") as caught:
        outer()
    caught.value.__traceback__ = None
    assert raised_at(caught.value) == place_of(deep, "linear(")


def test_library_lines_are_not_the_users() -> None:
    class Uncopied:
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError) as caught:
        copy.deepcopy([Uncopied()])
    assert raised_at(caught.value) == place_of(Uncopied.__deepcopy__, "raise")
    error = caught.value.with_traceback(None)
    assert raised_at(error) is None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        nn.functional.softmax(X)  # without a dim: warned of at the caller's line
        warnings.warn_explicit("deep", UserWarning, torch.__file__, 1)
    assert [warned_at(item) for item in said] == [
        place_of(test_library_lines_are_not_the_users, "softmax(X)"),
        None,
    ]


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
