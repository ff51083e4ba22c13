"""Remedies: every pattern is well formed and matches its messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from string import Formatter

import pytest
import torch
from torch import Tensor
from torch.jit.frontend import NotSupportedError

from freezer.freezing.diagnostics.messages import REMEDIES, Family, explain
from freezer.runtime.loaders import torchscript_deprecations_silenced


def test_remedies_use_only_groups_of_their_patterns() -> None:
    for pattern, means, remedy in (known for table in REMEDIES.values() for known in table):
        used = {name for text in (means, remedy) for _, name, _, _ in Formatter().parse(text)}
        assert used - {None} <= set(re.compile(pattern).groupindex), pattern


@pytest.mark.parametrize(
    ("family", "text", "means"),
    [
        ("script", "Unknown type annotation: 'List[int]' at ", "annotation 'List[int]' is text"),
        ("script", "Unknown type annotation: '<class 'a.B'>' at", "does not know the type 'a.B'"),
        ("script", "Unknown type name 'np.ndarray':\n", "does not know the type 'np.ndarray'"),
        ("script", "with statements aren't supported:\n", "does not take with statements"),
        ("script", "undefined value hasattr:\n", "does not know 'hasattr'"),
        ("script", "Python builtin <built-in method random of object> is", "know 'random'"),
        ("script", "Unable to extract string literal index. ModuleDict", "indexed by a variable"),
        ("trace", "Could not export Python function call 'Double'", "Python function 'Double'"),
        ("export", "There was no fake impl registered for <CustomOpDef(a::b)>", "operator a::b"),
        ("inductor", "Cannot access storage of SparseTensorImpl", "sparse tensors"),
        (
            "onnxruntime",
            "[enforce fail at inline_container.cc:672] . unexpected pos 64",
            "not write",
        ),
    ],
)
def test_message_is_explained(family: Family, text: str, means: str) -> None:
    found = explain(text, family)
    assert found is not None
    assert means in found.means


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


def test_unknown_message_has_no_remedy() -> None:
    assert all(explain("something else went wrong", family) is None for family in REMEDIES)
