"""Subject: a model in its initial state, its input spec, its outputs and its input sets.

`prepare` makes one, `to_device` moves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import nn

from freezer.codec import frozen
from freezer.errors import JudgeError
from freezer.freezing.models.calls import (
    DtypesSeen,
    NamedTensors,
    copied,
    device_of_model,
    first_result,
    model_on,
)
from freezer.freezing.models.checks import (
    check_kept_names,
    check_signature,
    check_weights,
    weights_digest,
)
from freezer.freezing.models.integer_ranges import with_found_ranges, with_found_relations
from freezer.freezing.models.samples import Points, input_sets
from freezer.freezing.sources import find_function
from freezer.runtime.devices import CPU, tensors_on
from freezer.runtime.held_out import HeldOut, read_held_out
from freezer.runtime.input_sets import (
    InputSet,
    generate_at,
    match_samples,
    needs_range,
    on_device,
    resize,
)
from freezer.runtime.tensors import dtypes_of, flatten, output_specs, program_tensors
from freezer.spec import DTYPES, Accuracy, InputSpec, OutputSpec, OutputStructure, Point


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and everything needed to capture and judge it. Nothing here ever changes `model`.

    Attributes:
        name: name of the catalog entry.
        model: in eval mode, in its initial state; use `fresh()` to run it.
        spec: input spec.
        structure, outputs: structure and tensors of its result.
        sets: input sets at every corner and middle point, at some between, and at `points`.
        generated: whether further sets may be generated; otherwise they are made of these.
        points: sizes by dim name at which the model is timed and may get its own payload. The
            verdict is taken at the first.
        preserve: attributes, methods and attributes of submodules (`sub.attr`) that the frozen
            model must keep.
        reset: the method that clears the model's state; it is preserved too.
        device: the device of the model and the sets: the CPU, or a GPU with its index.
        host: for a subject on a GPU, the same subject on the CPU.
        observed: whether the ranges of integers are those of an example, not declared.
        dtypes: of the weights and of what eager computes with, such as `bfloat16` under autocast.
        held_out: samples of the budget of a lower precision, on the CPU; None without consent.
    """

    name: str
    model: nn.Module
    spec: InputSpec
    structure: OutputStructure
    outputs: tuple[OutputSpec, ...]
    sets: Sequence[InputSet]
    points: tuple[Point, ...]
    generated: bool = False
    preserve: Sequence[str] = ()
    reset: str | None = None
    device: torch.device = CPU
    host: Subject | None = None
    observed: bool = False
    dtypes: frozenset[str] = frozenset()
    held_out: HeldOut | None = None

    @property
    def scripted(self) -> bool:
        """Whether the source is TorchScript."""
        return isinstance(self.model, torch.jit.ScriptModule)

    @property
    def on_host(self) -> Subject:
        """The subject on the CPU, from which the float64 reference is made."""
        return self.host or self

    @cached_property
    def weights(self) -> str:
        """Digest of the model's weights."""
        return weights_digest(self.on_host.model)

    @property
    def kept_names(self) -> tuple[str, ...]:
        """All names that the frozen model must keep: `preserve` and `reset`."""
        names = dict.fromkeys([*self.preserve, self.reset])
        return tuple(name for name in names if name is not None)

    def fresh(self) -> nn.Module:
        """A copy of the model in its initial state."""
        return copied(self.model)

    def set_at(self, point: Point) -> InputSet:
        """The first input set at a point of `spec.points()` or `points`."""
        return next(each for each in self.sets if each.point == point)

    def further_set(self, point: Point) -> InputSet:
        """Make another input set at a point, on the subject's device."""
        if self.generated:
            made = generate_at(self.spec, point, seed=sum(point.values()))
        else:
            made = resize(self.on_host.sets[0], self.spec, point)
        return on_device(made, self.device)


@frozen
class SubjectOptions:
    """Options of `prepare`.

    Attributes:
        preserve, reset: see Subject.
        points: see Subject; a dim that a point omits takes its minimum. Without points, every dim
            takes its minimum.
        fill_up: add generated input sets to the samples.
        device: where the model is first run. The subject is made on the CPU all the same; see
            `to_device`.
        accuracy: budget of a lower precision.
        search_path: folders with the module of its metric.
    """

    preserve: Sequence[str] = ()
    reset: str | None = None
    points: Points = ()
    fill_up: bool = False
    device: torch.device = CPU
    accuracy: Accuracy | None = None
    search_path: Sequence[str] = ()


def prepare(
    name: str,
    model: nn.Module,
    spec: InputSpec,
    samples: Sequence[NamedTensors] = (),
    options: SubjectOptions | None = None,
) -> Subject:
    """Make a subject on the CPU: check the model, make its input sets, and run it once.

    Args:
        model: the source model; it is copied, and never run or changed itself.
        samples: real input sets; without any, sets are generated.

    Raises:
        SourceError, SpecError, JudgeError: the model, its samples or its results cannot be used.
    """
    options = options or SubjectOptions()
    model = _checked(name, model, spec, options)
    matched = match_samples([tensors_on(tensors, CPU) for tensors in samples], spec)
    spec, sets = _spec_and_sets(name, model, spec, matched, options)
    structure, outputs, dtypes = _first_answer(name, model, spec, sets[0], options.device)
    find = partial(find_function, search_path=options.search_path)
    return Subject(
        name=name,
        model=model,
        spec=spec,
        structure=structure,
        outputs=outputs,
        sets=sets,
        points=spec.named_points(options.points),
        generated=options.fill_up or not samples,
        observed=bool(options.fill_up and samples),
        dtypes=frozenset(dtypes),
        preserve=options.preserve,
        reset=options.reset,
        held_out=read_held_out(options.accuracy, spec, find) if options.accuracy else None,
    )


def _spec_and_sets(
    name: str,
    model: nn.Module,
    spec: InputSpec,
    samples: Sequence[InputSet],
    options: SubjectOptions,
) -> tuple[InputSpec, list[InputSet]]:
    """The spec with what eager shows of its integers, and the input sets."""
    sample = samples[0].tensors if samples else None
    generated = options.fill_up or not samples
    spec = with_found_ranges(
        name,
        model,
        spec,
        sample,
        generated=generated,
    )
    points = spec.named_points(options.points)

    def tried_sets(spec: InputSpec) -> list[InputSet]:
        sets = input_sets(
            samples,
            spec,
            points,
            fill_up=options.fill_up,
        )
        if not any(map(needs_range, spec.tensors)):
            sets.append(generate_at(spec, points[0], seed=1))  # as timing may
        return sets

    spec = with_found_relations(name, model, spec, tried_sets)
    return spec, input_sets(
        samples,
        spec,
        points,
        fill_up=options.fill_up,
    )


def _first_answer(
    name: str,
    model: nn.Module,
    spec: InputSpec,
    item: InputSet,
    device: torch.device,
) -> tuple[OutputStructure, tuple[OutputSpec, ...], set[str]]:
    """The structure and the outputs of the first answer, and the dtypes that eager computes
    with.
    """
    tried = model if device.type == "cpu" else model_on(model, device)
    seen = DtypesSeen()
    try:
        with seen:
            structure, outputs = _result_of(name, tried, spec, item, device)
    except JudgeError:  # of the model, or of an operator that no mode takes, such as torch.cond
        torch.compiler.reset()  # which compiled itself for the mode
        structure, outputs = _result_of(name, tried, spec, item, device)
    return structure, outputs, seen.dtypes | dtypes_of(program_tensors(model))


def _checked(
    name: str,
    model: nn.Module,
    spec: InputSpec,
    options: SubjectOptions,
) -> nn.Module:
    """The model on the CPU, after the checks that need no call."""
    check_weights(name, model)
    if device_of_model(model).type != "cpu":
        model = model_on(model, CPU)
    check_signature(model, spec)
    check_kept_names(name, model, options.preserve, options.reset)
    return model


def _result_of(
    name: str,
    model: nn.Module,
    spec: InputSpec,
    item: InputSet,
    device: torch.device,
) -> tuple[OutputStructure, tuple[OutputSpec, ...]]:
    """Run a model once on its device; its result must hold dense tensors of comparable dtypes on
    that device.
    """
    structure, leaves = flatten(first_result(name, model, spec, on_device(item, device)))
    if not leaves:
        raise JudgeError(
            f"{name}: forward returned no tensor; expected at least one", code="CP-OUTPUTS"
        )
    outputs = output_specs(structure, leaves)
    device = torch.empty(0, device=device).device
    for output, leaf in zip(outputs, leaves, strict=True):
        dense = leaf.layout is torch.strided and leaf.device == device
        if output.dtype not in DTYPES or not dense:
            raise JudgeError(
                f"{name}: output {output.name!r} is {output.dtype}, {leaf.layout} on {leaf.device},"
                f" expected a dense tensor on {device} of one of {', '.join(DTYPES)}; cast it,"
                " return .to_dense(), or move it to the device of the inputs",
                code="CP-OUTPUTS",
            )
    return structure, outputs


def to_device(subject: Subject, device: torch.device) -> Subject:
    """Move a subject to a device: copies of its model and input sets, with the subject on the CPU
    as `host`.

    Raises:
        JudgeError: the model fails there, or leaves an output on another device; code CP-EAGER.
    """
    if subject.device == device:
        return subject
    host = subject.on_host
    if device == CPU:
        return host
    model = model_on(host.model, device)
    try:
        _result_of(host.name, model, host.spec, host.sets[0], device)
    except JudgeError as error:
        raise JudgeError(
            f"{error}; it runs on the CPU, but not on {device}: create tensors on the device of the"
            " inputs (x.device), and keep constants in buffers",
            code="CP-EAGER",
        ) from error
    return replace(
        host,
        model=model,
        sets=[on_device(input_set, device) for input_set in host.sets],
        device=device,
        host=host,
    )
