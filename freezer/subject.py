"""The subject of a freeze: a model in its initial state, what it takes and gives, and the input sets it is tried on."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from freezer.errors import JudgeError, SpecError
from freezer.outputs import flatten, output_specs
from freezer.samples import InputSet, cover_points, generate, match_samples
from freezer.spec import InputSpec, OutputSpec, OutputStructure, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and everything that capturing and judging it needs. Nothing here ever changes `model`.

    Attributes:
        name: of the catalog entry.
        model: in eval mode, in its initial state; use `fresh()` to run it.
        spec: of its inputs.
        structure, outputs: of its result.
        sets: input sets over every corner and middle point.
        scripted: whether it came as TorchScript.
    """

    name: str
    model: nn.Module
    spec: InputSpec
    structure: OutputStructure
    outputs: tuple[OutputSpec, ...]
    sets: tuple[InputSet, ...]
    scripted: bool

    def fresh(self) -> nn.Module:
        """A copy of the model in its initial state."""
        with torch.no_grad():  # else a copied ScriptModule's parameters are no leaves, and .double() warns of them
            return copy.deepcopy(self.model)

    def set_at(self, point: Mapping[str, int]) -> InputSet:
        """The first input set at a point.

        Raises:
            SpecError: no set is there.
        """
        for item in self.sets:
            if dict(item.point) == dict(point):
                return item
        raise SpecError(f"no input set has the sizes {dict(point)}; add samples of these sizes")


def prepare(
    name: str, model: nn.Module, spec: InputSpec, samples: Sequence[Mapping[str, Tensor]] = (), *, fill_up: bool = False
) -> Subject:
    """The subject of a freeze: input sets are made and the eager model is run once to learn its outputs.

    Args:
        name: of the entry.
        model: the source model; it is copied, never run or changed itself.
        spec: of its inputs.
        samples: real input sets; generated ones are used where there are none.
        fill_up: add generated sets to the samples.

    Raises:
        SpecError: the samples do not fit the spec, or the spec does not fit `forward`.
        JudgeError: the eager model does not run on its own inputs.
    """
    check_signature(model, spec)
    sets = cover_points(match_samples(samples, spec), spec) if samples else generate(spec)
    if samples and fill_up:
        sets = [*sets, *generate(spec)]
    try:
        with torch.random.fork_rng(devices=[]):  # a model that draws random numbers leaves the caller's stream as it was
            result = call_source(copy.deepcopy(model).eval(), spec, sets[0].cloned())
    except Exception as error:
        raise JudgeError(f"{name}: the eager model does not run on its inputs: {type(error).__name__}: {error}") from error
    structure, leaves = flatten(result)
    if not leaves:
        raise JudgeError(f"{name}: forward returned no tensor; expected at least one")
    return Subject(
        name=name,
        model=model,
        spec=spec,
        structure=structure,
        outputs=output_specs(structure, leaves),
        sets=tuple(sets),
        scripted=isinstance(model, torch.jit.ScriptModule),
    )


def bind(spec: InputSpec, tensors: Mapping[str, Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """The args and kwargs of a call of the source model; constants take their places."""
    values = {**spec.constants, **tensors}
    if spec.style == "positional":
        return [values[item.name] for item in spec.inputs], {}
    return [], {item.name: values[item.name] for item in spec.inputs}


def call_source(model: Any, spec: InputSpec, tensors: Mapping[str, Tensor]) -> Any:
    """The source model's own result, without gradients."""
    args, kwargs = bind(spec, tensors)
    with torch.no_grad():
        return model(*args, **kwargs)


def check_signature(model: nn.Module, spec: InputSpec) -> None:
    """Hold keyword inputs against the parameters of `forward`.

    Raises:
        SpecError: `forward` has no parameter of that name.
    """
    if spec.style == "positional":
        return
    if isinstance(model, torch.jit.ScriptModule):
        schema = model.forward.schema  # type: ignore[attr-defined]
        names = [argument.name for argument in schema.arguments if argument.name != "self"]
    else:
        parameters = inspect.signature(model.forward).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return
        names = [parameter.name for parameter in parameters]
    for item in spec.inputs:
        if item.name not in names:
            what = "input" if isinstance(item, TensorSpec) else "constant input"
            raise SpecError(
                f"{what} {item.name!r} is no parameter of forward({', '.join(names)}); name its parameters, or give a list"
            )
