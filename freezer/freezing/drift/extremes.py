"""Extremes: inputs that generated and real sets hardly ever have, such as zeros, large values,
empty masks, the ends of ranges, NaN and Inf. Each is judged apart from the others and from normal
inputs.

An answer must have NaN and Inf where eager has them, and an error of at most 1e-3 of the output's
root mean square, or three times eager's own. Eager's own error is its distance from the float64
reference, and that of reruns with operands changed in their last place (`reruns`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from freezer.compare import eager_tolerance
from freezer.compare.tensor_values import comparable, in_double
from freezer.freezing.drift.runs import (
    Call,
    Rerun,
    copied,
    eager_reruns,
    run_float64,
    source_runner,
)
from freezer.freezing.drift.ties import at_ties
from freezer.freezing.models import Subject
from freezer.runtime.input_sets import InputSet, is_mask, on_device
from freezer.runtime.tensors import dtype_name
from freezer.spec import FLOATING, INTEGRAL, InputSpec, TensorSpec

NUM_RERUNS = 3

NEAR = 64
"""Sizes of a dim, from its least, of which further ones are chosen; greater ones take longer."""

OWN_ERROR = 3.0
"""Multiple of eager's own error that passes."""


@dataclass(frozen=True)
class Extreme:
    """One extreme set.

    Attributes:
        name: what is extreme, in words.
        subject: the subject with this set alone.
        eager: eager's outputs.
        stateful: whether a call changes the answers of later calls.
    """

    name: str
    subject: Subject
    eager: Sequence[Tensor]
    stateful: bool

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """The input tensors by path."""
        return self.subject.sets[0].tensors

    def problem(self, names: Sequence[str], answers: Sequence[Tensor]) -> str | None:
        """What is wrong with a candidate's outputs; None if nothing is, or ties explain it.

        Of integers and bools, three times as many may differ as differ between eager's reruns.
        """
        if len(answers) != len(names):
            return f"{self.name}: {len(answers)} outputs, eager gives {len(names)}"
        for index, name in enumerate(names):
            problem = self._problem_of(index, self.eager[index], answers[index])
            settled = at_ties([self._call(answers)], {index}, self._rerun) if problem else None
            if settled is not None:
                (call,), _ = settled
                problem = self._problem_of(index, call.eager[index], answers[index])
            if problem:
                return f"{self.name}: output {name!r}: {problem}"
        return None

    def _call(self, answers: Sequence[Tensor]) -> Call:
        return Call(
            kind="single",
            set_index=0,
            reference=self._float64 or self.eager,
            eager=self.eager,
            noise_rmse=[0.0] * len(self.eager),
            candidate=answers,
        )

    def lost(self, names: Sequence[str], answers: Sequence[Tensor]) -> str | None:
        """Where a candidate has numbers in place of eager's NaN or Inf; None if nowhere."""
        for name, e, c in zip(names, self.eager, answers, strict=True):
            if not comparable(e) or e.shape != c.shape:
                continue
            num_lost = int((~e.isfinite() & c.isfinite()).sum())
            if num_lost:
                return f"output {name!r} has numbers in place of {num_lost} of eager's {self.name}"
        return None

    def _problem_of(self, index: int, e: Tensor, c: Tensor) -> str | None:
        if c.shape != e.shape or c.dtype != e.dtype:
            return f"got {c.dtype} {list(c.shape)}, expected {e.dtype} {list(e.shape)}"
        if not comparable(e):
            num_wrong = int((c != e).sum())
            answers = self._others(index) if num_wrong else []
            num_own = max((int((answer != e).sum()) for answer in answers), default=0)
            if num_wrong <= OWN_ERROR * num_own:
                return None
            return f"{num_wrong} of {e.numel()} elements differ"
        least = eager_tolerance(dtype_name(e.dtype))
        wide, right = in_double(c), in_double(e)
        apart = _kinds(wide) != _kinds(right)
        if not apart.any() and _rms(wide - right) <= 0.5 * least * _rms(right):
            return None
        others = [in_double(answer) for answer in self._others(index)]
        for answer in others:
            apart &= _kinds(answer) == _kinds(right)
        if apart.any():
            return f"NaN or Inf at other places than eager's ({int(apart.sum())} of {e.numel()})"
        r = right if self._float64 is None else others[0]
        own = max((_rms(answer - r) for answer in (right, *others)), default=0.0)
        error, size = _rms(wide - r), _rms(r)
        if error <= max(least * size, OWN_ERROR * own):
            return None
        return (
            f"an error of {error:.3g}, where the values are of {size:.3g} and eager's of {own:.3g}"
        )

    def _others(self, index: int) -> list[Tensor]:
        """Further right answers: the float64 reference first, if it runs."""
        answers = [] if self._float64 is None else [self._float64]
        return [outputs[index] for outputs in (*answers, *self._reruns)]

    @cached_property
    def _float64(self) -> Sequence[Tensor] | None:
        results, _ = run_float64(self.subject.on_host, [self.eager], stateful=self.stateful)
        return results[0] if results else None

    @cached_property
    def _rerun(self) -> Rerun:
        return eager_reruns(self.subject, stateful=self.stateful, num_calls=1)

    @cached_property
    def _reruns(self) -> list[Sequence[Tensor]]:
        runs = (self._rerun(seed) for seed in range(NUM_RERUNS))
        return [outputs[0] for outputs in runs if outputs is not None]


def _kinds(values: Tensor) -> Tensor:
    """0 where a value is finite, else which of NaN, Inf and -Inf it is."""
    real = torch.view_as_real(values) if values.is_complex() else values
    return real.isnan() * 1 + real.isposinf() * 2 + real.isneginf() * 3


def _rms(values: Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.abs().square().mean().sqrt()) if finite.numel() else 0.0


Extremes = tuple[tuple[Extreme, ...], tuple[Extreme, ...], tuple[Extreme, ...]]


def extremes_of(subject: Subject, stateful: bool) -> Extremes:
    """The extreme sets that eager takes, those with NaN and Inf, and two normal ones alike."""
    kinds = {_kind(item) for item in subject.spec.tensors}
    few = FEW if subject.observed else ()
    changes = [change for change in (*CHANGES, *few) if change[0] in kinds]
    bases = _bases(subject)
    numbers = []
    for number, change in enumerate(changes):
        base = bases[number % len(bases)]
        numbers.append((change[1], _changed(subject.spec, base, change)))
    for point in _further_points(subject):
        sizes = ", ".join(f"{name}={size}" for name, size in point.items())
        numbers.append((f"sizes {sizes}", subject.further_set(point)))
    missing = [(change[1], _changed(subject.spec, bases[0], change)) for change in MISSING]
    others = (other for other in subject.sets if other.point == bases[0].point)
    another = next((other for other in others if not other.equals(bases[0])), None)
    another = another or subject.further_set(bases[0].point)
    normal = [("normal values", bases[0]), ("other values", another)]
    return (
        tuple(_taken(subject, numbers, stateful)),
        tuple(_taken(subject, missing, stateful)),
        tuple(_taken(subject, normal, stateful)),
    )


def _taken(
    subject: Subject, sets: Sequence[tuple[str, InputSet]], stateful: bool
) -> Iterator[Extreme]:
    """The sets that eager takes; where it fails, a candidate may."""
    first = subject.sets[0]
    for name, inputs in sets:
        if inputs is not first and inputs.equals(first):
            continue
        alone = _alone(subject, inputs)
        try:
            eager = copied(source_runner(alone.fresh(), alone).call(inputs.tensors))
        except Exception:  # it may also give another structure, which no candidate can
            continue
        yield Extreme(name, alone, eager, stateful)


def _alone(subject: Subject, inputs: InputSet) -> Subject:
    """The subject with one set."""
    host = subject.host
    if host is not None:
        host = replace(host, sets=(on_device(inputs, host.device),))
    return replace(subject, sets=(inputs,), host=host)


def _bases(subject: Subject) -> list[InputSet]:
    """A normal set at the deciding point, and one of middle size."""
    by_size = sorted(subject.sets, key=lambda inputs: sum(inputs.point.values()))
    first = subject.set_at(subject.points[0])
    return [first, by_size[len(by_size) // 2]]


def _further_points(subject: Subject) -> list[dict[str, int]]:
    """Points that no other set has: one to three above a multiple of 16, and one that depends on
    the weights, so that no lowering can be made for it.
    """
    spec, drawn = subject.spec, random.Random(subject.weights)
    points = [{dim.name: drawn.choice(dim.sizes[:NEAR]) for dim in spec.dims}]
    for beyond in (1, 2, 3):
        point = {}
        for dim in spec.dims:
            near = dim.sizes[:NEAR]
            sizes = [size for size in near if size % 16 == beyond] or near
            point[dim.name] = sizes[-1]
        points.append(point)
    known = [dict(inputs.point) for inputs in subject.sets]
    further: list[dict[str, int]] = []
    for point in points:
        if point not in (*known, *further):
            further.append(point)
    return further


Kind = Literal["float", "mask", "integer", "other"]
Change = tuple[Kind, str, Callable[[Tensor, float, float], Tensor]]
"""The kind of inputs that are changed, what they are afterwards, and how to make them of a tensor,
the least and the greatest value.
"""


def _kind(item: TensorSpec) -> Kind:
    if item.dtype == "bool" or is_mask(item):
        return "mask"
    if item.dtype in INTEGRAL:
        return "integer"
    return "float" if item.dtype in FLOATING else "other"


def _ends(item: TensorSpec, tensor: Tensor) -> tuple[float, float]:
    """The least and the greatest value of an input."""
    if item.indices or item.range or _kind(item) != "integer":
        return item.indices or item.range or (0, 1)
    return int(tensor.min()), int(tensor.max())


def _changed(spec: InputSpec, base: InputSet, change: Change) -> InputSet:
    """A set with the inputs of a kind changed, floating-point ones within their range."""
    kind, _, make = change
    tensors = dict(base.tensors)
    for item in spec.tensors:
        tensor = tensors[item.name]
        if _kind(item) != kind or not tensor.numel():
            continue
        made = make(tensor, *_ends(item, tensor))
        if kind == "float" and item.range is not None:
            made = made.clamp(*item.range)  # keeps NaN
        tensors[item.name] = made.to(tensor.dtype)
    return replace(base, tensors=tensors)


def _with_rows(mask: Tensor, value: int, rows: slice, columns: slice) -> Tensor:
    """A mask with a value in some rows and columns, and the other value elsewhere."""
    changed = torch.full_like(mask, 1 - value)
    changed.view(-1, mask.shape[-1] if mask.dim() else 1)[rows, columns] = value
    return changed


def _with_element(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[tensor.numel() // 2] = value
    return changed


def _run(tensor: Tensor, low: float, high: float) -> Tensor:
    steps = torch.arange(tensor.numel(), device=tensor.device)
    return (steps % int(high - low + 1) + int(low)).view(tensor.shape)


def _hole(mask: Tensor, low: float, high: float) -> Tensor:
    middle = mask.shape[-1] // 2 if mask.dim() else 0
    return _with_rows(mask, 0, slice(None), slice(middle, middle + 1))


CHANGES: tuple[Change, ...] = (
    ("float", "all values at the low end, or 0", lambda x, low, high: torch.full_like(x, low)),
    ("float", "all values at the high end, or 1", lambda x, low, high: torch.full_like(x, high)),
    ("float", "whole numbers", lambda x, low, high: (4 * x).round()),
    ("float", "values 10 times as large", lambda x, low, high: 10 * x),
    ("float", "values 100 times as large", lambda x, low, high: 100 * x),
    ("float", "values 1e-6 times as large", lambda x, low, high: 1e-6 * x),
    ("mask", "masks of zeros", lambda x, low, high: torch.zeros_like(x)),
    ("mask", "masks of ones", lambda x, low, high: torch.ones_like(x)),
    ("mask", "masks with a hole", _hole),
    ("mask", "an empty mask", lambda x, low, high: _with_rows(x, 0, slice(-1, None), slice(None))),
    ("mask", "masks of one", lambda x, low, high: _with_rows(x, 1, slice(None), slice(0, 1))),
    ("integer", "the least integers", lambda x, low, high: torch.full_like(x, int(low))),
    ("integer", "the greatest integers", lambda x, low, high: torch.full_like(x, int(high))),
    ("integer", "integers that run through their range", _run),
)

FEW: tuple[Change, ...] = (
    ("integer", "integers of 0", lambda x, low, high: torch.zeros_like(x)),
    ("integer", "integers of 1", lambda x, low, high: torch.ones_like(x)),
)
"""Lengths and counts that an example may lack."""

MISSING: tuple[Change, ...] = (
    ("float", "NaN", lambda x, low, high: _with_element(x, torch.nan)),
    ("float", "Inf", lambda x, low, high: _with_element(x, torch.inf)),
)
