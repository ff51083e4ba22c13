"""Extremes: inputs that generated and real sets hardly ever have, such as zeros, large values,
empty masks, the ends of ranges, NaN and Inf. Each is judged apart from the others and from normal
inputs.

An answer must have NaN and Inf where eager has them, and an error of at most 1e-3 of the output's
root mean square, or three times eager's own. Eager's own error is its distance from the float64
reference, and that of reruns with operands changed in their last place (`reruns`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from freezer.compare import eager_tolerance
from freezer.compare.tensor_values import comparable, in_double
from freezer.errors import ColdpressError
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
from freezer.runtime.input_sets import InputSet, is_mask
from freezer.runtime.tensors import dtype_name
from freezer.spec import FLOATING, INTEGRAL, TensorSpec

NUM_RERUNS = 3

OWN_ERROR = 3.0
"""Multiple of eager's own error that passes."""

Change = Callable[[TensorSpec, Tensor], Tensor]
"""Makes an extreme input of a normal one."""


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


def extremes_of(subject: Subject, *, stateful: bool) -> tuple[tuple[Extreme, ...], ...]:
    """The extreme sets that eager takes, and apart from these the sets with NaN and Inf."""
    numbers = _tried(subject, _changes(subject), stateful)
    missing = _tried(subject, (("NaN", _with(torch.nan)), ("Inf", _with(torch.inf))), stateful)
    return tuple(numbers), tuple(missing)


def _tried(
    subject: Subject, changes: Sequence[tuple[str, Change]], stateful: bool
) -> Iterator[Extreme]:
    """The sets that differ from the normal ones they are made of, and that eager takes."""
    bases = _bases(subject)
    for number, (name, change) in enumerate(changes):
        base = bases[number % len(bases)]
        tensors = {}
        for item in subject.spec.tensors:
            tensor = base.tensors[item.name]
            tensors[item.name] = change(item, tensor) if tensor.numel() else tensor
        changed = replace(base, tensors=tensors)
        if changed.equals(base):
            continue
        alone = _alone(subject, changed)
        try:
            eager = copied(source_runner(alone.fresh(), alone).call(changed.tensors))
        except ColdpressError:
            raise
        except Exception:  # eager does not take such inputs: neither need a candidate
            continue
        yield Extreme(name, alone, eager, stateful)


def _alone(subject: Subject, inputs: InputSet) -> Subject:
    """The subject with one set."""
    host = subject.host
    if host is not None:
        on_cpu = {name: tensor.cpu() for name, tensor in inputs.tensors.items()}
        host = replace(host, sets=(replace(inputs, tensors=on_cpu),))
    return replace(subject, sets=(inputs,), host=host)


def _bases(subject: Subject) -> list[InputSet]:
    """A normal set at the deciding point, and one of middle size."""
    by_size = sorted(subject.sets, key=lambda inputs: sum(inputs.point.values()))
    first = subject.set_at(subject.points[0])
    return [first, by_size[len(by_size) // 2]]


def _changes(subject: Subject) -> list[tuple[str, Change]]:
    """The changes for the kinds of inputs that a subject has."""
    items = subject.spec.tensors
    changes: list[tuple[str, Change]] = []
    if any(map(_is_float, items)):
        changes += [(name, _of(_is_float, change)) for name, change in _FLOATS.items()]
    if any(map(_is_switch, items)):
        changes += [(name, _of(_is_switch, change)) for name, change in _MASKS.items()]
    if any(map(_is_integer, items)):
        integers = {**_INTEGERS, **(_FEW if subject.observed else {})}
        changes += [(name, _of(_is_integer, change)) for name, change in integers.items()]
    return changes


def _of(kind: Callable[[TensorSpec], bool], change: Change) -> Change:
    """The change of inputs of a kind; the others stay."""
    return lambda item, tensor: change(item, tensor) if kind(item) else tensor


def _is_float(item: TensorSpec) -> bool:
    return item.dtype in FLOATING and not is_mask(item)


def _is_switch(item: TensorSpec) -> bool:
    return item.dtype == "bool" or is_mask(item)


def _is_integer(item: TensorSpec) -> bool:
    return item.dtype in INTEGRAL and not _is_switch(item)


def _within(item: TensorSpec, tensor: Tensor) -> Tensor:
    return tensor if item.range is None else tensor.clamp(*item.range)


def _times(factor: float) -> Change:
    return lambda item, tensor: _within(item, tensor * factor)


def _end(index: int) -> Change:
    """All values at an end of the range; without a range 0 or 1."""
    return lambda item, tensor: torch.full_like(tensor, (item.range or (0, 1))[index])


_FLOATS: Mapping[str, Change] = {
    "all values at the low end, or 0": _end(0),
    "all values at the high end, or 1": _end(1),
    "whole numbers": lambda item, tensor: _within(item, (4 * tensor).round()),
    "values 10 times as large": _times(10),
    "values 100 times as large": _times(100),
    "values 1e-6 times as large": _times(1e-6),
}


def _rows(mask: Tensor) -> Tensor:
    """The rows of a contiguous mask, as a view."""
    return mask.view(-1, mask.shape[-1] if mask.dim() else 1)


def _hole(item: TensorSpec, mask: Tensor) -> Tensor:
    changed = torch.ones_like(mask)
    rows = _rows(changed)
    rows[:, rows.shape[1] // 2] = 0
    return changed


def _empty_row(item: TensorSpec, mask: Tensor) -> Tensor:
    changed = torch.ones_like(mask)
    _rows(changed)[-1] = 0
    return changed


def _only_first(item: TensorSpec, mask: Tensor) -> Tensor:
    changed = torch.zeros_like(mask)
    _rows(changed)[:, 0] = 1
    return changed


_MASKS: Mapping[str, Change] = {
    "masks with a hole": _hole,
    "masks with an empty row": _empty_row,
    "masks with one element": _only_first,
    "masks of zeros": lambda item, mask: torch.zeros_like(mask),
    "masks of ones": lambda item, mask: torch.ones_like(mask),
}


def _ends(item: TensorSpec, tensor: Tensor) -> tuple[int, int]:
    """The valid integers: indices of a table, or else the range or the values at hand."""
    bounds = item.indices or item.range or (int(tensor.min()), int(tensor.max()))
    return int(bounds[0]), int(bounds[1])


def _every(item: TensorSpec, tensor: Tensor) -> Tensor:
    """Integers that run through their range."""
    low, high = _ends(item, tensor)
    run = torch.arange(tensor.numel(), device=tensor.device) % (high - low + 1) + low
    return run.view(tensor.shape).to(tensor.dtype)


_INTEGERS: Mapping[str, Change] = {
    "the least integers": lambda item, tensor: torch.full_like(tensor, _ends(item, tensor)[0]),
    "the greatest integers": lambda item, tensor: torch.full_like(tensor, _ends(item, tensor)[1]),
    "integers that run through their range": _every,
}

_FEW: Mapping[str, Change] = {
    "integers of 0": lambda item, tensor: torch.zeros_like(tensor),
    "integers of 1": lambda item, tensor: torch.ones_like(tensor),
}
"""Lengths and counts that an example may lack."""


def _with(value: float) -> Change:
    """Replace the middle element of each floating-point input."""

    def change(item: TensorSpec, tensor: Tensor) -> Tensor:
        if not _is_float(item):
            return tensor
        changed = tensor.clone()
        changed.view(-1)[tensor.numel() // 2] = value
        return changed

    return change
