"""Captures: making a graph of a model. Every capture works on a fresh copy of the model, in its initial state.

`export` and `trace` capture a flat form of the model: tensor inputs in order, a tuple of tensors out, constants baked in. So a
payload depends on no class of the source: not on its outputs' types, not on its package. A model that came as TorchScript is
taken `as-is`; `script` compiles a model's own source. Both are called as the source is.

What torch.jit.trace and torch.jit.script give is held against the eager model before anything is built of it: faithful.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from freezer.capture_errors import export_sentence, script_sentence, trace_sentence
from freezer.errors import CaptureError
from freezer.faithful import Call, EagerAnswers, ask_eager, flat_call, hold, native_call
from freezer.legacy import torchscript_deprecations_silenced
from freezer.outputs import leaves_of
from freezer.recipes import CaptureName
from freezer.source_lines import warned_at
from freezer.spec import InputSpec
from freezer.subject import Subject, bind


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A graph of a model.

    Attributes:
        name: of the capture that made it.
        program: an ExportedProgram, or a ScriptModule.
        convention: how a payload made of it is called.
        mutates: names of the buffers that a call changes, as far as the graph tells.
        warnings: what the capture said, one line each.
        guards: what inputs must hold to besides the declared dims, in words.
        notes: what else people should know of the capture.
        preserve: attributes and methods that a lowering must keep.
    """

    name: CaptureName
    program: Any
    convention: Literal["flat", "native"]
    mutates: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    preserve: tuple[str, ...] = ()


class FlatModule(nn.Module):
    """A model called with its tensor inputs in order, giving its output tensors as a tuple."""

    def __init__(self, model: nn.Module, spec: InputSpec) -> None:
        super().__init__()
        self.model = model
        self._spec = spec

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The output tensors, in order."""
        named = {item.name: tensor for item, tensor in zip(self._spec.tensors, tensors, strict=True)}
        args, kwargs = bind(self._spec, named)
        return tuple(leaves_of(self.model(*args, **kwargs)))


class Attempt:
    """A subject that captures are tried on, and its eager answers, which are asked for when the first capture needs them."""

    def __init__(self, subject: Subject, point: Mapping[str, int] | None) -> None:
        at_point = tuple(item for item in subject.sets if point is None or dict(item.point) == dict(point))
        self.subject = replace(subject, sets=at_point)
        self.point = point

    @functools.cached_property
    def eager(self) -> EagerAnswers:
        """What the eager model answers."""
        return ask_eager(self.subject)

    def unfit(self, name: CaptureName) -> str | None:
        """Why a capture is not for such a model at all, in a few words; None where it is worth a try."""
        scripted = self.subject.scripted
        if name in ("as-is", "convert"):
            return None if scripted else "the source is no TorchScript"
        if scripted:
            return "the source is TorchScript"
        if name == "script" and isinstance(self.subject.model, torch.fx.GraphModule):
            return "the source is an exported program, which torch.jit.script does not take"
        return None

    def capture(self, name: CaptureName) -> Captured:
        """The graph that one capture makes.

        Raises:
            CaptureError: it is not for such a model, does not take it, or what it made differs from the model.
        """
        if why := self.unfit(name):
            raise CaptureError(why)
        return _CAPTURES[name](self)


def _export(attempt: Attempt, *, strict: bool = False) -> Captured:
    subject, point = attempt.subject, attempt.point
    spec = subject.spec
    dynamic = {dim.name: torch.export.Dim(dim.name, min=dim.min, max=dim.max) for dim in spec.dims if dim.min < dim.max}
    if point is not None:
        dynamic = {}
    example = subject.set_at(point if point is not None else _example_point(subject))
    shapes = tuple(
        {axis: dynamic[size] for axis, size in enumerate(item.shape) if isinstance(size, str) and size in dynamic} or None
        for item in spec.tensors
    )
    try:
        with torch.no_grad(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            program = torch.export.export(
                FlatModule(subject.fresh(), spec).eval(),
                tuple(example.cloned().values()),
                dynamic_shapes={"tensors": shapes} if dynamic else None,
                strict=strict,
            )
    except Exception as error:
        raise CaptureError(f"torch.export: {export_sentence(error)}") from error
    return Captured(
        name="export-strict" if strict else "export",
        program=program,
        convention="flat",
        mutates=_mutated(program),
        warnings=_lines(said),
    )


def _mutated(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Names of the buffers that a call changes.

    torch.export leaves in-place operations in the graph, and its signature names no changed buffer until they are functionalized;
    that costs seconds for a large model, so only graphs that hold such an operation are.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if any(_writes(node) for node in program.graph.nodes):
            program = program.run_decompositions({})
    return tuple(sorted(program.graph_signature.buffers_to_mutate.values()))


def _writes(node: torch.fx.Node) -> bool:
    """Whether an operation may change what it is given; higher-order operations are not looked into, and may."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if node.target in (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default):
        return bool(node.args[5])  # running statistics are changed in training, which the schema does not say
    schema = getattr(node.target, "_schema", None)
    return schema is None or bool(schema.is_mutable)


def _convert(attempt: Attempt) -> Captured:
    raise CaptureError("not there yet")


def _trace(attempt: Attempt) -> Captured:
    subject, point = attempt.subject, attempt.point
    example = subject.set_at(point if point is not None else subject.spec.first_point())
    flat = FlatModule(subject.fresh(), subject.spec).eval()
    try:
        with torch.no_grad(), torchscript_deprecations_silenced(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            program = torch.jit.trace(flat, tuple(example.cloned().values()), check_trace=False)
    except Exception as error:
        raise CaptureError(f"torch.jit.trace: {trace_sentence(error)}") from error
    _restore(program, FlatModule(subject.fresh(), subject.spec))
    unheld = _hold("the trace", program, flat_call, attempt, said)
    return Captured(name="trace", program=program, convention="flat", warnings=(*_lines(said), *unheld))


def _restore(program: nn.Module, initial: nn.Module) -> None:
    """Put buffers and parameters back to their initial state: tracing runs the model, which may change them."""
    before = {**dict(initial.named_buffers()), **dict(initial.named_parameters())}
    with torch.no_grad():
        for name, tensor in (*program.named_buffers(), *program.named_parameters()):
            if name in before and before[name].shape == tensor.shape:
                tensor.copy_(before[name])


def _script(attempt: Attempt) -> Captured:
    subject = attempt.subject
    try:
        with torch.no_grad(), torchscript_deprecations_silenced(), _new_types(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            program = torch.jit.script(subject.fresh())
    except Exception as error:
        raise CaptureError(f"torch.jit.script: {script_sentence(error)}") from error
    unheld = _hold("the script", program, lambda copied: native_call(copied, subject), attempt, said)
    return Captured(name="script", program=program, convention="native", warnings=(*_lines(said), *unheld))


@contextlib.contextmanager
def _new_types() -> Iterator[None]:
    """Let torch.jit.script compile each class anew.

    It keeps the type of a class that it could not compile, and says of the same class the next time that `forward` cannot be
    redefined, whatever is wrong.
    """
    kept = torch.jit._recursive.concrete_type_store
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    try:
        yield
    finally:
        torch.jit._recursive.concrete_type_store = kept


def _as_is(attempt: Attempt) -> Captured:
    return Captured(name="as-is", program=attempt.subject.fresh(), convention="native")


def _hold(
    what: str, program: Any, caller: Callable[[Any], Call], attempt: Attempt, said: Sequence[warnings.WarningMessage]
) -> tuple[str, ...]:
    """Hold a program against the eager model; returns a line that says so where it cannot be done. The program keeps its state."""
    if not attempt.eager.deterministic:
        return (f"{what} is not held against the model, which answers the same inputs differently",)

    def fresh() -> Call:
        with torch.no_grad():  # as Subject.fresh
            return caller(program if attempt.eager.second is None else copy.deepcopy(program))

    hold(what, fresh, attempt.subject, attempt.eager, said)
    return ()


_CAPTURES: Mapping[CaptureName, Callable[[Attempt], Captured]] = {
    "export": _export,
    "export-strict": functools.partial(_export, strict=True),
    "convert": _convert,
    "trace": _trace,
    "script": _script,
    "as-is": _as_is,
}


def _example_point(subject: Subject) -> dict[str, int]:
    """A point whose sizes are all above 1 where the dims allow it: torch.export specializes on sizes 0 and 1."""
    points = list(subject.spec.points())
    return min(points, key=lambda point: (sum(size < 2 for size in point.values()), sum(point.values())))


def _lines(said: list[warnings.WarningMessage]) -> tuple[str, ...]:
    """One line a warning, with the user's own line; torch.jit's deprecation and repetitions are left out."""
    seen: dict[str, None] = {}
    for item in said:
        text = str(item.message).strip().splitlines()[0] if str(item.message).strip() else item.category.__name__
        if "torch.jit." not in text or "deprecated" not in text:
            place = warned_at(item)
            seen[f"{item.category.__name__}: {text}" + (f" At {place}" if place else "")] = None
    return tuple(seen)
