"""Preserved attributes and methods of models and submodules; refused methods of nn.Module."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import ContractError, NotPreservedError
from freezer.freezing.capture import Captured
from freezer.freezing.lowering import torchscript_files as torchscript
from freezer.freezing.models import example_spec
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import target_here
from freezer.runtime.frozen_model import FrozenModel
from freezer.runtime.loaders import open_torchscript, torchscript_deprecations_silenced
from tests.support.models import seeded
from tests.support.models_state import Constant, Number, Versioned
from tests.support.steps import frozen_function, plain_payload, random_inputs

X = random_inputs(2, 3, 8, 8)
KINDS = ("torchscript-optimized", "portable")
NAMES = (
    "version",
    "title",
    "enabled",
    "bias",
    "inputs",
    "names",
    "sizes",
    "offset",
    "sub.version",
    "sub.scale",
)
METHODS = ("encode", "describe", "upgrade")


def lowered(
    model: nn.Module, preserve: Sequence[str], settings: Mapping[str, Any], path: Path
) -> None:
    """Build a payload of the scripted model with a recipe's settings."""
    with torchscript_deprecations_silenced():
        program = torch.jit.script(copy.deepcopy(model))
    captured = Captured(
        name="script", program=program, convention="native", preserve=tuple(preserve)
    )
    torchscript.build(captured, path, target_here("portable", 1), settings)


def served(
    model: nn.Module,
    x: Tensor,
    preserve: Sequence[str],
    recipe: str,
    folder: Path,
    num_threads: int | None = None,
) -> FrozenModel:
    """The frozen model of one input, without build and judge."""
    settings, path = RECIPES[recipe].settings, folder / "all.pt"
    lowered(model, preserve, settings, path)
    spec, _ = example_spec({"x": x}, {})
    result = copy.deepcopy(model)(x).detach()
    payload = plain_payload("torchscript", num_threads, convention="native")
    run = open_torchscript(path, settings)
    return frozen_function(run, spec, result, payload, preserve=tuple(preserve))


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def versioned(kind: str, tmp_path: Path) -> FrozenModel:
    return served(seeded(Versioned), X, (*NAMES, *METHODS), kind, tmp_path)


def source_of(model: type[nn.Module]) -> Any:
    """The source, untyped."""
    return seeded(model)


def near(kind: str, got: Tensor, expected: Tensor) -> None:
    """Exact, unless batch norms were folded or oneDNN's layouts taken."""
    if kind == "portable":
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


# Attributes


def test_attributes_are_read(versioned: FrozenModel) -> None:
    values = {"version": 1, "title": "first", "enabled": True, "bias": 0.5, "names": ["a", "b"]}
    assert {name: getattr(versioned, name) for name in values} == values
    assert versioned.sizes == {"a": 1}
    assert torch.equal(versioned.offset, torch.zeros(4))
    assert (versioned.sub.version, versioned.sub.scale) == (3, 2.0)
    assert list(versioned.preserved) == [*NAMES, *METHODS]


def test_set_attributes_change_later_calls(kind: str, versioned: FrozenModel) -> None:
    source = source_of(Versioned)
    near(kind, versioned(X), source(X).detach())
    for model in (versioned, source):
        model.version = 2
        model.title = "second"
        model.bias = 1.5
        model.offset = torch.arange(4.0)
        model.names = ["c"]
        model.sub.scale = 3.0
    near(kind, versioned(X), source(X).detach())
    assert versioned.describe() == source.describe() == ("second", 2)
    assert versioned.names == ["c"]
    assert (versioned.sub.scale, versioned.preserved["sub.scale"]) == (3.0, 3.0)
    versioned.offset.add_(1)
    source.offset.add_(1)
    near(kind, versioned(X), source(X).detach())


def test_colliding_names_are_reached_by_index(kind: str, versioned: FrozenModel) -> None:
    source = source_of(Versioned)
    assert versioned.inputs is not versioned.preserved["inputs"]
    assert versioned.preserved["inputs"] == 7
    versioned.preserved["inputs"] = 2
    source.inputs = 2
    near(kind, versioned(X), source(X).detach())
    with pytest.raises(ContractError) as caught:
        versioned.inputs = 3  # type: ignore[assignment]
    assert caught.value.code == "CP-FROZEN"
    with pytest.raises(ContractError):
        versioned.ladder = ()


def test_other_attributes_raise_with_a_remedy(tmp_path: Path) -> None:
    model = served(seeded(Versioned), X, ("version", "describe"), "torchscript-frozen", tmp_path)
    message = (
        r"no attribute or method 'title'; preserved are version, describe\. Freeze the model again"
        r" with `preserve: \[title\]`"
    )
    with pytest.raises(AttributeError, match=message) as caught:
        _ = model.title
    assert isinstance(caught.value, NotPreservedError)
    assert caught.value.code == "CP-NOT-PRESERVED"
    assert not hasattr(model, "title")
    assert not hasattr(model, "__array__")
    with pytest.raises(NotPreservedError):
        model.title = "second"


@pytest.mark.parametrize(
    ("name", "value"), [("version", "two"), ("offset", 1.0), ("names", [1]), ("encode", None)]
)
def test_values_of_other_types_are_refused(
    versioned: FrozenModel, name: str, value: object
) -> None:
    with pytest.raises(ContractError):
        setattr(versioned, name, value)


# Methods


def test_methods_are_called(kind: str, versioned: FrozenModel) -> None:
    source = source_of(Versioned)
    near(kind, versioned.encode(X), source.encode(X).detach())
    near(kind, versioned.encode(X, factor=2.0), source.encode(X, 2.0).detach())
    assert versioned.describe() == ("first", 1)
    assert (versioned.upgrade(3), versioned.upgrade(by=2), versioned.version) == (4, 6, 6)
    assert not versioned.encode(X.clone().requires_grad_()).requires_grad


# Lowering


def test_constants_cannot_be_set(kind: str, tmp_path: Path) -> None:
    model = served(seeded(Constant), X, ("rate",), kind, tmp_path)
    assert model.rate == 16
    with pytest.raises(ContractError):
        model.rate = 8


# Refused methods


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> FrozenModel:
    return served(
        seeded(Number),
        random_inputs(2, 4),
        ("calls",),
        "torchscript-frozen",
        tmp_path_factory.mktemp("plain"),
    )


@pytest.mark.parametrize(
    "refused",
    [
        lambda m: m.to("cuda"),
        lambda m: m.half(),
        lambda m: m.train(),
        lambda m: list(m.parameters()),
        lambda m: m.register_forward_hook(print),
        lambda m: m.forward(X),
        lambda m: setattr(m, "training", True),
        copy.copy,
        pickle.dumps,
    ],
)
def test_methods_of_modules_are_refused(plain: FrozenModel, refused: Any) -> None:
    with pytest.raises(ContractError) as caught:
        refused(plain)
    assert caught.value.code == "CP-FROZEN"
