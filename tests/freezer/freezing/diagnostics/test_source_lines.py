"""The user's source line, and failures of captures as one sentence."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import CaptureError
from freezer.freezing.diagnostics.source_lines import marked_in, raised_at, warned_at
from freezer.runtime.loaders import torchscript_deprecations_silenced
from tests.support.lines import place_of
from tests.support.models import Calling
from tests.support.steps import captured_by, random_inputs, subject_of

X = random_inputs(2, 4)


def deep(x: Tensor) -> Tensor:
    return nn.functional.linear(x, torch.zeros(3, 5))


def test_raised_at_is_the_users_innermost_line() -> None:
    with pytest.raises(RuntimeError) as caught:
        Calling(deep)(X)
    assert raised_at(caught.value) == place_of(deep, "linear(")


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


def in_no_file(signature: str) -> Callable[..., Tensor]:
    """A function without a file, like a GraphModule's forward, that reads a value."""
    made: dict[str, Any] = {}
    exec(f"def made({signature}):\n    return x if bool(x.sum() > 0) else -x\n", made)
    function: Callable[..., Tensor] = made["made"]
    return function


def reads_in_no_file(x: Tensor) -> Tensor:
    return in_no_file("x")(x)


class Generated(nn.Module):
    forward = in_no_file("self, x")


def test_lines_that_call_freezer_are_ignored() -> None:
    with pytest.raises(
        CaptureError, match=r"what Python reads of its inputs at a line of torch; "
    ) as caught:
        captured_by(subject_of(Generated(), {"x": X}), "trace")
    assert "test_source_lines.py" not in str(caught.value)
    with pytest.raises(CaptureError, match=re.escape(place_of(reads_in_no_file, "return"))):
        captured_by(subject_of(Calling(reads_in_no_file), {"x": X}), "trace")


class Called(nn.Module):
    """Fails in a function of torch that forward calls."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return x
        return x * 2


class WithHelper(nn.Module):
    """Fails in a method that forward calls."""

    def helper(self, x: Tensor) -> Tensor:
        return sorted([x], key=lambda item: item.sum())[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)


@pytest.mark.parametrize(
    ("model", "function", "part"),
    [(Called, Called.forward, "if torch"), (WithHelper, WithHelper.helper, "sorted(")],
)
def test_script_error_has_line_and_remedy(
    model: type[nn.Module], function: Callable[..., Any], part: str
) -> None:
    subject, messages = subject_of(model(), {"x": X}), []
    for _ in range(2):  # TorchScript caches no failed type
        with pytest.raises(CaptureError) as caught:
            captured_by(subject, "script")
        messages.append(str(caught.value))
    place = place_of(function, part).removesuffix(":")
    assert re.match(f"torch.jit.script: .* at {re.escape(place)}; ", messages[0])
    assert messages[1] == messages[0]


def test_export_error_has_line_and_remedy() -> None:
    def to_numpy(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)

    with pytest.raises(CaptureError) as caught:
        captured_by(subject_of(Calling(to_numpy), {"x": X}), "export")
    place = place_of(to_numpy, "return")
    assert str(caught.value).startswith(f"torch.export: forward uses NumPy at {place}; ")


def test_marked_statement_reports_its_first_line() -> None:
    with torchscript_deprecations_silenced(), pytest.raises(RuntimeError) as caught:
        torch.jit.script(Called())
    assert "~\n            return x\n" in str(caught.value)
    assert marked_in(str(caught.value)) == place_of(Called.forward, "if torch")
    assert marked_in("no mark") is None
