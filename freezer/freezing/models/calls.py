"""Calls of the eager source model, and their failures as errors that name the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from freezer.errors import JudgeError
from freezer.freezing.models.cloning import copied
from freezer.runtime.input_sets import InputSet
from freezer.runtime.tensors import same_bytes
from freezer.spec.inputs import InputSpec, bind


class SourceCall:
    """A copy of the model to call. Leaves the caller's random stream unchanged."""

    def __init__(self, name: str, model: nn.Module) -> None:
        try:
            self._copy = copied(model).eval()
        except Exception as error:
            raise JudgeError(
                f"{name}: the model cannot be copied, which freezing requires: {described(error)}; move what cannot be copied out "
                "of the model, or define __deepcopy__"
            ) from error

    def __call__(self, spec: InputSpec, tensors: Mapping[str, Tensor]) -> Any:
        """The result of the copy."""
        with torch.random.fork_rng(devices=[]):
            return call_source(self._copy, spec, tensors)


def first_result(name: str, model: nn.Module, spec: InputSpec, item: InputSet) -> Any:
    """The result of the first call.

    Raises:
        JudgeError: the eager model fails (code CP-EAGER), or writes into its inputs (code CP-INPUT-WRITTEN).
    """
    given = item.cloned()
    before = {path: _version(tensor) for path, tensor in given.items()}
    source = SourceCall(name, model)
    try:
        result = source(spec, given)
    except Exception as error:
        raise JudgeError(f"{name}: the eager model fails on its inputs: {described(error)}", code="CP-EAGER") from error
    written = [
        path for path, tensor in given.items() if _version(tensor) != before[path] or not same_bytes(tensor, item.tensors[path])
    ]
    if written:
        paths, plural = ", ".join(repr(path) for path in written), "s" if len(written) > 1 else ""
        raise JudgeError(
            f"{name}: a call writes into its input{plural} {paths}, which would change the caller's tensors; start forward with a "
            f"copy (`x = x.clone()`), or return the new value",
            code="CP-INPUT-WRITTEN",
        )
    return result


def _version(tensor: Tensor) -> int:
    """A counter of writes into a tensor, including those that leave its values unchanged."""
    return 0 if tensor.is_inference() else tensor._version


def described(error: Exception) -> str:
    """The type and message of an error."""
    return f"{type(error).__name__}: {error}"


def call_source(model: Any, spec: InputSpec, tensors: Mapping[str, Tensor]) -> Any:
    """The source model's result, without gradients."""
    args, kwargs = bind(spec, tensors)
    with torch.no_grad():
        return model(*args, **kwargs)
