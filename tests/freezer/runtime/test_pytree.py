"""Flattening and rebuilding of results; NamedOutput."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from freezer.errors import CaptureError
from freezer.runtime.tensors import flatten, leaves_of, output_specs
from freezer.spec import unflatten
from freezer.spec.items import NamedOutput

A, B = torch.zeros(2), torch.ones(3, dtype=torch.int64)


@dataclass
class Plain:
    logits: Tensor
    loss: Tensor | None = None


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def model_output() -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=A, hidden_states=(A, B))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: A, ["output"]),
        (lambda: [A, (B, None)], ["0", "1.0"]),
        (lambda: {"a": A, "b": {"c": B}, "d": 3, "e": "text", "f": None, "g": True}, ["a", "b.c"]),
        (lambda: Plain(logits=A), ["logits"]),
        (lambda: Pair(A, B), ["first", "second"]),
        (lambda: OrderedDict(z=A, a=B), ["z", "a"]),
        (model_output, ["last_hidden_state", "hidden_states.0", "hidden_states.1"]),
    ],
)
def test_results_are_rebuilt(make: Callable[[], Any], names: list[str]) -> None:
    result = make()
    structure, leaves = flatten(result)
    again = unflatten(structure, leaves)
    assert [spec.name for spec in output_specs(structure, leaves)] == names
    if type(result) in (Tensor, tuple, list, dict):
        assert type(again) is type(result)
    elif isinstance(result, Pair):
        assert (type(again).__name__, again._fields) == ("Pair", Pair._fields)
    else:
        assert type(again) is NamedOutput
    assert flatten(again)[0].items == structure.items
    assert all(one is other for one, other in zip(leaves_of(again), leaves, strict=True))


def test_named_output_access() -> None:
    output = pickle.loads(pickle.dumps(unflatten(*flatten(Plain(logits=A, loss=B)))))
    assert output.logits is output["logits"] is output[0]
    assert output[-1] is output.loss
    assert list(output) == ["logits", "loss"]
    with pytest.raises(AttributeError, match="the output has no 'hidden'; it has logits, loss"):
        output.hidden  # noqa: B018 - the access itself is under test
    for key, error in (("hidden", KeyError), (2, IndexError)):
        with pytest.raises(error):
            output[key]
    assert unflatten(*flatten(Plain(logits=A)))[1] is None


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({A}, "output is a builtins.set; expected tensors"),
        ({"a": [A, {1, 2}]}, r"output\.a\.1 is a builtins.set"),
        ({"a": {1: A}}, r"output\.a has the key 1;"),
    ],
)
def test_other_results_are_refused(result: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        flatten(result)
