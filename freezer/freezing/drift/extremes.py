"""Extremes: inputs that generated and real sets hardly ever have, such as zeros, large values,
empty masks, the ends of ranges, NaN and Inf. Each is judged apart from the others and from normal
inputs.

An answer must have NaN and Inf where eager has them, and an error of at most 1e-3 of the output's
root mean square, or three times eager's own. Eager's own error is its distance from the float64
reference, and that of reruns with operands changed in their last place (`reruns`). A lower
precision only has to compute the same function; its budget judges the rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from freezer.compare import eager_tolerance
from freezer.freezing.drift.runs import (
    Call,
    Rerun,
    copied,
    eager_reruns,
    run_float64,
    source_runner,
)
from freezer.freezing.drift.ties import at_ties, misplaced
from freezer.freezing.models import NamedTensors, Outputs, Subject
from freezer.runtime.input_sets import InputSet, is_mask, on_device
from freezer.runtime.tensors import comparable, dtype_name, in_double
from freezer.spec import FLOAT32, FLOATING, INTEGRAL, InputSpec, Point, TensorSpec

NUM_RERUNS = 3

NEAR = 64
"""Sizes of a dim, from its least, of which further ones are chosen; greater ones take longer."""

OWN_ERROR = 3.0
"""Multiple of eager's own error that passes."""

SHARES = {"tf32": 0.02, "fp16": 0.02, "bf16": 0.1, "int8": 0.5}
"""Error of a lower precision that passes, as a share of the output's usual root mean square."""

_BEYOND = ("values ", "whole ")
"""Starts of the names of sets far from real values, where what was calibrated ends: of a lower
precision only NaN and Inf are judged."""

MISSING = {"NaN": torch.nan, "Inf": torch.inf}


@dataclass(frozen=True)
class Extreme:
    """One extreme set.

    Attributes:
        name: what is extreme, in words.
        subject: the subject with this set alone.
        eager: eager's outputs.
        stateful: whether a call changes the answers of later calls.
        usual: root mean square of each output in the normal call where it is largest.
    """

    name: str
    subject: Subject
    eager: Sequence[Tensor]
    stateful: bool
    usual: Sequence[float] = ()

    @property
    def inputs(self) -> NamedTensors:
        """The input tensors by path."""
        return self.subject.sets[0].tensors

    @property
    def missing(self) -> bool:
        """Whether each floating-point input has a NaN or an Inf."""
        return self.name in MISSING

    def problem(self, answers: Sequence[Tensor], precision: str = FLOAT32) -> str | None:
        """What is wrong with a candidate's outputs; None if nothing is, or ties explain it.

        Of integers and bools, three times as many may differ as differ between eager's reruns; of a
        lower precision, all.
        """
        for index, (e, c) in enumerate(zip(self.eager, answers, strict=True)):
            if c.shape != e.shape or c.dtype != e.dtype:
                got, expected = (f"{t.dtype} {list(t.shape)}" for t in (c, e))
                problem: str | None = f"got {got}, expected {expected}"
            elif precision == FLOAT32:
                problem = self._unexplained(index, answers)
            else:
                share = SHARES[precision.partition("+")[0]]
                problem = self._lower_problem(e, c, share, self.usual[index])
            if problem:
                return f"{self.name}: output {self._output(index)}: {problem}"
        return None

    def lost(self, answers: Sequence[Tensor]) -> str | None:
        """Where a candidate has numbers in place of eager's NaN or Inf; None if nowhere."""
        for index, (e, c) in enumerate(zip(self.eager, answers, strict=True)):
            if comparable(e) and e.shape == c.shape:
                num = int((~e.isfinite() & c.isfinite()).sum())
                if num:
                    output = self._output(index)
                    return f"output {output} has numbers in place of {num} of eager's {self.name}"
        return None

    def _output(self, index: int) -> str:
        return repr(self.subject.outputs[index].name)

    def _lower_problem(self, e: Tensor, c: Tensor, share: float, usual: float) -> str | None:
        if not comparable(e):
            return None
        wide, right = in_double(c), in_double(e)
        if misplaced(wide, right).any():
            return "NaN or Inf at other places than eager's"
        error, size = rms_of(wide - right), max(rms_of(right), usual)
        if self.name.startswith(_BEYOND) or error <= share * size:
            return None
        return f"an error of {error:.3g}, where the values are of {size:.3g}"

    def _unexplained(self, index: int, answers: Sequence[Tensor]) -> str | None:
        problem = self._problem_of(index, self.eager[index], answers[index])
        if problem is None:
            return None
        call = Call(
            kind="single",
            set_index=0,
            reference=self._float64 or self.eager,
            eager=self.eager,
            noise_rmse=[0.0] * len(answers),
            candidate=answers,
        )
        settled = at_ties([call], {index}, self._rerun)
        if settled is None:
            return problem
        (call,), _ = settled
        return self._problem_of(index, call.eager[index], answers[index])

    def _problem_of(self, index: int, e: Tensor, c: Tensor) -> str | None:
        if not comparable(e):
            num_wrong = int((c != e).sum())
            answers = self._others(index) if num_wrong else []
            num_own = max((int((answer != e).sum()) for answer in answers), default=0)
            if num_wrong <= OWN_ERROR * num_own:
                return None
            return f"{num_wrong} of {e.numel()} elements differ"
        least = eager_tolerance(dtype_name(e.dtype))
        wide, right = in_double(c), in_double(e)
        apart = misplaced(wide, right)
        if not apart.any() and rms_of(wide - right) <= 0.5 * least * rms_of(right):
            return None
        others = [in_double(answer) for answer in self._others(index)]
        for answer in others:
            apart &= ~misplaced(answer, right)
        if apart.any():
            return f"NaN or Inf at other places than eager's ({int(apart.sum())} of {e.numel()})"
        r = right if self._float64 is None else others[0]
        own = max(rms_of(answer - r) for answer in (right, *others))
        error, size = rms_of(wide - r), rms_of(r)
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
        runs = map(self._rerun, range(NUM_RERUNS))
        return [outputs[0] for outputs in runs if outputs is not None]


def rms_of(values: Tensor) -> float:
    """Root mean square of the finite values."""
    finite = (wide := in_double(values))[wide.isfinite()]
    return float(finite.abs().square().mean().sqrt()) if finite.numel() else 0.0


def extremes_of(subject: Subject, stateful: bool, answers: Outputs) -> list[Extreme]:
    """The extreme sets that eager takes, those with NaN and Inf last; `answers` are normal ones."""
    makers = [*MAKERS, ("integer", _counts)] if subject.observed else MAKERS
    first, middle = _bases(subject)
    changed = list(_changed(subject.spec, first, makers).items())
    changed[1::2] = list(_changed(subject.spec, middle, makers).items())[1::2]
    further = [(f"sizes {point}", subject.further_set(point)) for point in _points(subject)]
    missing = _changed(subject.spec, first, [("float", _missing)]).items()
    usual = [max(map(rms_of, outputs)) for outputs in zip(*answers, strict=True)]
    found = _taken(subject, [*changed, *further, *missing], stateful)
    return [replace(extreme, usual=usual) for extreme in found]


def normal_sets(subject: Subject, stateful: bool) -> list[Extreme]:
    """Two normal sets of the deciding sizes, if eager takes them."""
    first, _ = _bases(subject)
    alike = (inputs for inputs in subject.sets if inputs.point == first.point)
    other = next((inputs for inputs in alike if not inputs.equals(first)), None)
    other = other or subject.further_set(first.point)
    return list(_taken(subject, [("normal values", first), ("other values", other)], stateful))


def _taken(
    subject: Subject, sets: Iterable[tuple[str, InputSet]], stateful: bool
) -> Iterator[Extreme]:
    """The sets that eager takes; where it fails, a candidate may."""
    first, host = subject.sets[0], subject.host
    for name, inputs in sets:
        if inputs is not first and inputs.equals(first):
            continue
        if host is not None:
            host = replace(host, sets=(on_device(inputs, host.device),))
        alone = replace(subject, sets=(inputs,), host=host)
        try:
            eager = copied(source_runner(alone.fresh(), alone).call(inputs.tensors))
        except Exception:  # it may also give another structure, which no candidate can
            continue
        yield Extreme(name, alone, eager, stateful)


def _bases(subject: Subject) -> tuple[InputSet, InputSet]:
    """A normal set at the deciding point, and one of middle size."""
    by_size = sorted(subject.sets, key=lambda inputs: sum(inputs.point.values()))
    return subject.set_at(subject.points[0]), by_size[len(by_size) // 2]


def _points(subject: Subject) -> list[Point]:
    """Points that no other set has: one to three above a multiple of 16, and one that depends on
    the weights, so that no lowering can be made for it.
    """
    drawn = random.Random(subject.weights)
    dims = {dim.name: dim.sizes[:NEAR] for dim in subject.spec.dims}
    points = [{name: drawn.choice(sizes) for name, sizes in dims.items()}]
    for beyond in (1, 2, 3):
        point = {}
        for name, sizes in dims.items():
            chosen = [size for size in sizes if size % 16 == beyond] or sizes
            point[name] = chosen[-1]
        points.append(point)
    known = [inputs.point for inputs in subject.sets]
    for made in points:
        if made not in known:
            known.append(made)
    return known[len(subject.sets) :]


Changes = dict[str, Tensor]
"""An input changed in several ways, by what is extreme then."""


def _changed(
    spec: InputSpec,
    base: InputSet,
    makers: Sequence[tuple[str, Callable[[TensorSpec, Tensor], Changes]]],
) -> dict[str, InputSet]:
    """Sets with all inputs of a kind changed, by what is extreme in them."""
    sets: dict[str, InputSet] = {}
    for kind, make in makers:
        for item in spec.tensors:
            tensor = base.tensors[item.name]
            if _kind(item) != kind or not tensor.numel():
                continue
            for name, made in make(item, tensor).items():
                inputs = sets.get(name, base)
                tensors = {**inputs.tensors, item.name: made.to(tensor.dtype)}
                sets[name] = replace(base, tensors=tensors)
    return sets


def _kind(item: TensorSpec) -> str:
    if item.dtype == "bool" or is_mask(item):
        return "mask"
    if item.dtype in INTEGRAL:
        return "integer"
    return "float" if item.dtype in FLOATING else "other"


def _floats(item: TensorSpec, x: Tensor) -> Changes:
    low, high = item.range or (0, 1)
    changes = {
        "all values at the low end, or 0": torch.full_like(x, low),
        "all values at the high end, or 1": torch.full_like(x, high),
        "whole numbers": (4 * x).round(),
        "values 10 times as large": 10 * x,
        "values 100 times as large": 100 * x,
        "values 1e-6 times as large": 1e-6 * x,
    }
    return _within(item, changes)


def _missing(item: TensorSpec, x: Tensor) -> Changes:
    changes = {name: x.clone() for name in MISSING}
    for name, made in changes.items():
        made.view(-1)[x.numel() // 2] = MISSING[name]
    return _within(item, changes)


def _within(item: TensorSpec, changes: Changes) -> Changes:
    """The values within the range of the input; NaN stays."""
    if item.range is None:
        return changes
    return {name: made.clamp(*item.range) for name, made in changes.items()}


def _masks(_: TensorSpec, x: Tensor) -> Changes:
    zeros, ones = torch.zeros_like(x), torch.ones_like(x)
    hole, empty, one = ones.clone(), ones.clone(), zeros.clone()
    width = x.shape[-1] if x.dim() else 1
    hole.view(-1, width)[:, width // 2] = 0
    empty.view(-1, width)[-1] = 0
    one.view(-1, width)[:, 0] = 1
    return {
        "masks of zeros": zeros,
        "masks of ones": ones,
        "masks with a hole": hole,
        "an empty mask": empty,
        "masks of one": one,
    }


def _integers(item: TensorSpec, x: Tensor) -> Changes:
    low, high = map(int, item.indices or item.range or (x.min(), x.max()))
    steps = torch.arange(x.numel(), device=x.device).view(x.shape)
    return {
        "the least integers": torch.full_like(x, low),
        "the greatest integers": torch.full_like(x, high),
        "integers that run through their range": steps % (high - low + 1) + low,
    }


def _counts(_: TensorSpec, x: Tensor) -> Changes:
    return {"integers of 0": torch.zeros_like(x), "integers of 1": torch.ones_like(x)}


MAKERS = [("float", _floats), ("mask", _masks), ("integer", _integers)]
