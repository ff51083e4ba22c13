"""A subject on the device that it is frozen for: captured, run and timed there, and held against a reference on the CPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from freezer.errors import JudgeError
from freezer.moving import CPU, model_on, tensors_on
from freezer.outputs import flatten
from freezer.samples import InputSet
from freezer.subject import Subject, first_result
from freezer.torchscript_graph import named_devices


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


def on_device(item: InputSet, device: torch.device) -> InputSet:
    """An input set with its tensors on a device."""
    return replace(item, tensors=tensors_on(item.tensors, device))


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
