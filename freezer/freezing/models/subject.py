"""The subject of a freeze: a model in its initial state, what it takes and gives, and the input sets it is tried on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from freezer.errors import JudgeError, SpecError
from freezer.freezing.models.calls import first_result
from freezer.freezing.models.checks import check_kept_names, check_signature, check_weights
from freezer.freezing.models.cloning import copied
from freezer.freezing.models.device_transfer import device_of_model, model_on
from freezer.freezing.models.input_ranges import with_found_ranges
from freezer.freezing.models.samples import cover_points, match_samples, with_points
from freezer.freezing.models.torchscript_module import named_devices
from freezer.runtime.devices import CPU, tensors_on
from freezer.runtime.input_set import InputSet, on_device
from freezer.runtime.pytree import flatten, output_specs
from freezer.runtime.sample_generation import generate
from freezer.spec.inputs import InputSpec
from freezer.spec.items import DTYPES
from freezer.spec.outputs import OutputSpec, OutputStructure
from freezer.spec.sample_headers import CODE


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
    if device_of_model(model).type != "cpu":  # every subject begins on the CPU, where its reference is; subject.py moves it
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


def placed(subject: Subject, device: torch.device) -> Subject:
    """The subject on a device: a copy of its model and of its input sets, and the subject on the CPU as `host`.

    Raises:
        JudgeError: the model does not run there, gives another form of result, or leaves an output elsewhere; code CP-EAGER.
    """
    if subject.device == device:
        return subject
    host = subject.on_host
    if device == CPU:
        return host
    moved = replace(
        host,
        model=model_on(host.model, device),
        sets=tuple(on_device(item, device) for item in host.sets),
        device=device,
        host=host,
    )
    _check_runs(moved)
    return moved


def _check_runs(subject: Subject) -> None:
    """Run the model once, where it was put."""
    try:
        structure, leaves = flatten(first_result(subject.name, subject.model, subject.spec, subject.sets[0]))
    except JudgeError as error:
        raise JudgeError(f"{error}; it runs on the CPU, and not on {subject.device}{_why(subject)}", code=error.code) from error
    if structure != subject.structure:
        raise JudgeError(
            f"{subject.name}: on {subject.device} the result has another form than on the CPU: {structure.to_json()}, expected "
            f"{subject.structure.to_json()}; give the same on every device",
            code="CP-EAGER",
        )
    there = torch.empty(0, device=subject.device).device
    for output, leaf in zip(subject.outputs, leaves, strict=True):
        if leaf.device != there:
            raise JudgeError(
                f"{subject.name}: output {output.name!r} is on {leaf.device}, expected {subject.device}, where the model and its "
                "inputs are; make it there (x.device), or freeze for a CPU class",
                code="CP-EAGER",
            )


def _why(subject: Subject) -> str:
    """What is known of the reason, as the end of a sentence."""
    if isinstance(subject.model, torch.jit.ScriptModule) and (named := named_devices(subject.model, "cpu")):
        return f", since its TorchScript names the device {named[0]}, which moving it does not change: make it anew there"
    return ": make tensors where the inputs are (x.device), and keep constants in buffers"
