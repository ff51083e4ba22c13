"""Remedies: every pattern is well formed and matches its messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from string import Formatter

import pytest
import torch
from torch import Tensor
from torch.jit.frontend import NotSupportedError

from freezer.freezing.diagnostics.remedies import FAMILIES, Family, Remedy, explain
from freezer.runtime.loaders import torchscript_deprecations_silenced

ALL = [(family, known) for family, table in FAMILIES.items() for known in table]


@pytest.mark.parametrize(
    ("family", "known"), ALL, ids=[f"{family}-{index}" for index, (family, _) in enumerate(ALL)]
)
def test_remedy_uses_only_its_patterns_groups(family: Family, known: Remedy) -> None:
    groups = set(re.compile(known.pattern).groupindex)
    used = {
        name
        for text in (known.means, known.remedy)
        for _, name, _, _ in Formatter().parse(text)
        if name
    }
    assert used <= groups
    for text in (known.means, known.remedy):
        assert text == text.strip().rstrip(".;:"), "a part of a sentence"


@pytest.mark.parametrize(
    ("family", "text", "means", "remedy"),
    [
        (
            "script",
            "Unknown type annotation: 'List[int]' at ",
            "the annotation 'List[int]' is text",
            "from __future__ import annotations",
        ),
        (
            "script",
            "Unknown type annotation: '<class 'numpy.ndarray'>' at",
            "does not know the type 'numpy.ndarray'",
            "annotate with Tensor",
        ),
        (
            "script",
            "[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0",
            "could not write the file",
            "free space",
        ),
        (
            "script",
            "Unknown type name 'np.ndarray':\n",
            "does not know the type 'np.ndarray'",
            "annotate with Tensor",
        ),
        (
            "script",
            "keyword-arg expansion is not supported:\n",
            "expands **kwargs",
            "write out its arguments",
        ),
        (
            "script",
            "with statements aren't supported:\n",
            "does not take with statements",
            "plain Python",
        ),
        (
            "script",
            "Return value was annotated as having type int but is actually of type Tensor:\n",
            "annotated to return int, but returns Tensor",
            "fix the annotation",
        ),
        (
            "script",
            (
                "Expected a value of type 'Tensor' for argument 'x' but instead found type"
                " 'int'.\nInferred 'x' to be of type 'Tensor' because it was not annotated with an"
                " explicit type.\n"
            ),
            "a parameter has no type",
            "annotate the parameters",
        ),
        (
            "script",
            "Python builtin <built-in method random of Random object> is",
            "does not know 'random'",
            "torch.rand",
        ),
        (
            "script",
            "Unable to extract string literal index. ModuleDict indexing is",
            "not a literal",
            "iterate",
        ),
        (
            "script",
            (
                "Module 'Uses' has no attribute 'plain' (This attribute exists on the Python"
                " module, but we failed to convert Python type: 'tests.Plain' to a TorchScript"
                " type."
            ),
            "the attribute 'plain', a tests.Plain",
            "in __init__",
        ),
        ("script", "undefined value hasattr:\n", "does not know 'hasattr'", "in __init__"),
        (
            "trace",
            "output 1 of traced region did not have observable data dependence with trace inputs",
            "does not depend",
            "remove it",
        ),
        (
            "trace",
            "Could not export Python function call 'Double'",
            "the Python function 'Double'",
            "@torch.jit.unused",
        ),
        (
            "export",
            "There was no fake impl registered for <CustomOpDef(a::b)>",
            "the operator a::b has no fake",
            "register_fake",
        ),
        (
            "inductor",
            "NotImplementedError: Cannot access storage of SparseTensorImpl",
            "sparse tensors",
            "torchscript-frozen",
        ),
    ],
)
def test_message_is_explained(family: Family, text: str, means: str, remedy: str) -> None:
    found = explain(text, family)
    assert found is not None
    assert means in found.means
    assert remedy in found.remedy


def untyped(x: Tensor, times=2):  # type: ignore[no-untyped-def]
    return x * times


def keywords(x: Tensor, **more: Tensor) -> Tensor:
    return x * more["by"]


def recursion(x: Tensor) -> Tensor:
    return recursion(x / 2) if bool(x.max() > 1) else x


def two_types(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        scale = x
        x = x + 1
    else:
        scale = 2  # type: ignore[assignment]
    return x * scale


def to_list(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist())


@pytest.mark.parametrize(
    ("function", "means"),
    [
        (untyped, "the parameter 'times' has no type"),
        (keywords, "takes *args, **kwargs"),
        (recursion, "'recursion' calls itself"),
        (two_types, "the variable 'scale' is Tensor in one branch and int in the other"),
        (to_list, "the result of .tolist() has no type"),
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
    assert all(explain("something else went wrong", family) is None for family in FAMILIES)
