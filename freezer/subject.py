"""The subject of a freeze: a model in its initial state, what it takes and gives, and the input sets it is tried on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from freezer.copies import copied
from freezer.errors import JudgeError, SpecError
from freezer.input_items import put_together
from freezer.kept_names import check_kept_names
from freezer.lookups import find_lengths
from freezer.moving import CPU, device_of_model, model_on, tensors_on
from freezer.outputs import flatten, output_specs
from freezer.sample_files import CODE
from freezer.samples import (
    InputSet,
    cover_points,
    generate,
    generate_at,
    match_samples,
    needs_range,
    range_is_needed,
    with_points,
)
from freezer.source_checks import check_weights
from freezer.spec import DTYPES, ConstantSpec, InputSpec, OutputSpec, OutputStructure
from freezer.tensor_bytes import same_bytes


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and everything that capturing and judging it needs. Nothing here ever changes `model`.

    Attributes:
        name: of the catalog entry.
        model: in eval mode, in its initial state; use `fresh()` to run it.
        spec: of its inputs.
        structure, outputs: of its result.
        sets: input sets over every corner and middle point, and over `points`.
        points: where the model is timed, and may get payloads of its own: sizes by dim name. The verdict is taken at the first.
        scripted: whether it came as TorchScript.
        preserve: attributes, methods and attributes of submodules (`sub.attr`) that the frozen model must still have.
        reset: the method that clears the model's state; it is preserved too.
        device: where the model and the sets lie: the CPU, or a GPU with its index.
        host: of a subject on a GPU, the same one on the CPU; None of one that is there itself.
    """

    name: str
    model: nn.Module
    spec: InputSpec
    structure: OutputStructure
    outputs: tuple[OutputSpec, ...]
    sets: tuple[InputSet, ...]
    points: tuple[Mapping[str, int], ...]
    scripted: bool
    preserve: tuple[str, ...] = ()
    reset: str | None = None
    device: torch.device = CPU
    host: Subject | None = None

    @property
    def on_host(self) -> Subject:
        """The subject on the CPU: what the float64 reference is made of."""
        return self.host or self

    @property
    def kept_names(self) -> tuple[str, ...]:
        """All that the frozen model must still have: what was asked for, and the reset method."""
        return tuple(dict.fromkeys((*self.preserve, *((self.reset,) if self.reset else ()))))

    def fresh(self) -> nn.Module:
        """A copy of the model in its initial state."""
        return copied(self.model)

    def set_at(self, point: Mapping[str, int]) -> InputSet:
        """The first input set at a point.

        Raises:
            SpecError: no set is there; code CP-SAMPLES.
        """
        for item in self.sets:
            if dict(item.point) == dict(point):
                return item
        raise SpecError(f"no input set has the sizes {dict(point)}; add samples of these sizes", code=CODE)


def prepare(
    name: str,
    model: nn.Module,
    spec: InputSpec,
    samples: Sequence[Mapping[str, Tensor]] = (),
    *,
    fill_up: bool = False,
    preserve: Sequence[str] = (),
    reset: str | None = None,
    points: Sequence[Mapping[str, int]] = (),
    device: torch.device = CPU,
) -> Subject:
    """The subject of a freeze, on the CPU: input sets are made and the eager model is run once to learn its outputs.

    An integer input without a range that sets are generated for gets one here, from the tables that the model looks it up in.

    Args:
        name: of the entry.
        model: the source model; it is copied, never run or changed itself.
        spec: of its inputs.
        samples: real input sets; generated ones are used where there are none.
        fill_up: add generated sets to the samples.
        preserve, reset: see Subject.
        points: see Subject; a dim that a point leaves out takes its least size. Without any, every dim is at its least.
        device: where the model is run; the subject begins on the CPU all the same, and is `placed` there afterwards.

    Raises:
        SourceError: weights have no values.
        SpecError: the samples do not fit the spec, the spec does not fit `forward`, or what should be preserved is not there.
        JudgeError: the eager model does not run on its own inputs, writes into them, or gives what cannot be compared.
    """
    if not isinstance(model, nn.Module):
        raise SpecError(f"{name}: got a {type(model).__name__}, expected an nn.Module; a frozen model is made of its source, anew")
    check_weights(name, model)
    if device_of_model(model).type != "cpu":  # every subject begins on the CPU, where its reference is; placement.py moves it
        model = model_on(model, CPU)
    samples = [tensors_on(tensors, CPU) for tensors in samples]
    check_signature(model, spec)
    check_kept_names(name, model, preserve, reset)
    matched = match_samples(samples, spec)
    if fill_up or not samples:
        spec = with_found_ranges(name, model, spec)
    sets = cover_points(matched, spec) if samples else generate(spec)
    if samples and fill_up:
        sets = [*sets, *generate(spec)]
    named = spec.named_points(points)
    sets = with_points(sets, spec, named, generated=not samples)
    tried = model if device.type == "cpu" else model_on(model, device)
    first = replace(sets[0], tensors=tensors_on(sets[0].tensors, device))
    structure, leaves = flatten(first_result(name, tried, spec, first))
    if not leaves:
        raise JudgeError(f"{name}: forward returned no tensor; expected at least one", code="CP-OUTPUTS")
    outputs = output_specs(structure, leaves)
    _check_outputs(name, outputs, leaves, device)
    return Subject(
        name=name,
        model=model,
        spec=spec,
        structure=structure,
        outputs=outputs,
        sets=tuple(sets),
        points=named,
        scripted=isinstance(model, torch.jit.ScriptModule),
        preserve=tuple(preserve),
        reset=reset,
    )


def with_found_ranges(name: str, model: nn.Module, spec: InputSpec) -> InputSpec:
    """The spec, with ranges for integer inputs that had none: indices into the tables that the eager model looks them up in.

    Raises:
        SpecError: a table is found for none, or the model does not run on what the range allows.
    """
    wanted = [item for item in spec.tensors if needs_range(item)]
    if not wanted:
        return spec
    zeros = generate_at(spec.with_ranges({item.name: (0, 0) for item in wanted}), spec.first_point(), seed=0).tensors
    lengths, problem = find_lengths(partial(_Source(name, model), spec, zeros), {item.name: zeros[item.name] for item in wanted})
    found = {
        item.name: (0, min(lengths[item.name] - 1, torch.iinfo(getattr(torch, item.dtype)).max))
        for item in wanted
        if lengths.get(item.name, 0) > 0
    }
    for item in wanted:
        if item.name not in found:
            note = (
                f"; with zeros the model fails: {_said(problem)}" if problem else "; the model looks it up in no table of its own"
            )
            raise range_is_needed(item, note)
    spec = spec.with_ranges(found)
    if problem is None:  # else its inputs are wrong in another way, and the first call says how
        _check_found(name, model, spec, found)
    return spec


def _check_found(name: str, model: nn.Module, spec: InputSpec, found: Mapping[str, tuple[int, int]]) -> None:
    source = _Source(name, model)
    for item in generate(spec):
        try:
            source(spec, item.tensors)
        except Exception as error:
            ranges = ", ".join(f"{path!r}: {list(bounds)}" for path, bounds in found.items())
            raise SpecError(
                f"{name}: the tables that the model looks integer inputs up in allow {ranges}, but it does not run on such values "
                f"at {dict(item.point)}: {_said(error)}; write `range: [low, high]` for them, or give samples"
            ) from error


class _Source:
    """A copy of the model. If it draws random numbers, the caller's stream is left as it was."""

    def __init__(self, name: str, model: nn.Module) -> None:
        try:
            self._copy = copied(model).eval()
        except Exception as error:
            raise JudgeError(
                f"{name}: the model cannot be copied, which every freeze begins with: {_said(error)}; keep what cannot be copied "
                "out of it, or give its class a __deepcopy__"
            ) from error

    def __call__(self, spec: InputSpec, tensors: Mapping[str, Tensor]) -> Any:
        with torch.random.fork_rng(devices=[]):
            return call_source(self._copy, spec, tensors)


def first_result(name: str, model: nn.Module, spec: InputSpec, item: InputSet) -> Any:
    """The result of the first call, whose inputs must be the same afterwards.

    Raises:
        JudgeError: the eager model does not run, or writes into its inputs (code CP-INPUT-WRITTEN).
    """
    given = item.cloned()
    before = {path: _version(tensor) for path, tensor in given.items()}
    source = _Source(name, model)
    try:
        result = source(spec, given)
    except Exception as error:
        raise JudgeError(f"{name}: the eager model does not run on its inputs: {_said(error)}", code="CP-EAGER") from error
    written = [
        path for path, tensor in given.items() if _version(tensor) != before[path] or not same_bytes(tensor, item.tensors[path])
    ]
    if written:
        paths, plural = ", ".join(repr(path) for path in written), "s" if len(written) > 1 else ""
        raise JudgeError(
            f"{name}: a call writes into its input{plural} {paths}, which would change what the caller holds; start forward with a "
            f"copy (`x = x.clone()`), or return the new value",
            code="CP-INPUT-WRITTEN",
        )
    return result


def _version(tensor: Tensor) -> int:
    """Counts what is written into a tensor, even where it leaves the values as they were."""
    return 0 if tensor.is_inference() else tensor._version


def _check_outputs(name: str, outputs: Sequence[OutputSpec], leaves: Sequence[Tensor], device: torch.device) -> None:
    device = torch.empty(0, device=device).device
    for output, leaf in zip(outputs, leaves, strict=True):
        place = f"{name}: output {output.name!r}"
        if output.dtype not in DTYPES:
            raise JudgeError(
                f"{place} is {output.dtype}, expected one of {', '.join(DTYPES)}; cast it at the end of forward", code="CP-OUTPUTS"
            )
        if leaf.layout is not torch.strided or leaf.device != device:
            where, remedy = ("the CPU", ".cpu()") if device.type == "cpu" else (str(device), "what lies where the inputs do")
            raise JudgeError(
                f"{place} is {leaf.layout} on {leaf.device}, expected a dense tensor on {where}; return .to_dense(), or {remedy}",
                code="CP-OUTPUTS",
            )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def bind(spec: InputSpec, tensors: Mapping[str, Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """The args and kwargs of a call of the source model: tensors, which are given by path, and constants take their places."""
    if spec.style == "positional":
        return [put_together(item, tensors) for item in spec.inputs], {}
    return [], {item.name: put_together(item, tensors) for item in spec.inputs}


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
            what = "constant input" if isinstance(item, ConstantSpec) else "input"
            head = item.name.partition(".")[0]
            nested = f"; declare {head!r} as a tuple, list or dict of its parts" if head in names else ""
            raise SpecError(
                f"{what} {item.name!r} is no parameter of forward({', '.join(names)}); name its parameters, or give a list{nested}"
            )
