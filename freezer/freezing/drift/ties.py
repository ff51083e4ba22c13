"""Ties: places where rounding decides a discrete answer, such as the order of nearly equal scores,
a value between two decimals, or whether `acos` of a value near 1 is a number.

There a right candidate may answer differently: ids, boxes in sorted order, `torch.round(x,
decimals=2)`. A difference is allowed if eager gives the same answer at the same place, or the
float64 reference does, or eager when each operand of each operator changes at random by up to eight
units in its last place. This is discrete stochastic arithmetic (Vignes 2004, "Discrete stochastic
arithmetic for validating results of numerical software"): what changes with the last place is
decided by rounding. Any other difference stays. NaN and Inf at other places than eager's are
allowed where the reruns have them, and numbers in their place up to twice as large as the reruns'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from freezer.freezing.drift.runs import Call, Rerun
from freezer.freezing.models import Outputs
from freezer.runtime.tensors import comparable, in_double, same_tensors

_NUM_RUNS = 32
"""Runs with changed operands, at most.

A place where they answer otherwise in 1 of 5 runs is missed once in 1,000 times.
"""

MAX_FRUITLESS_RUNS = 8
"""Most consecutive runs that explain no further element; a candidate that drifts costs no more of
them.
"""

MAX_SHARE, MAX_OUT_OF_ORDER = 0.05, 0.25
"""Share of an output's elements that may differ by ties in a call, and where the values are eager's
in another order. A candidate with more computes something else, or the data lies where rounding
decides, and eager's choice counts.
"""

FEW = 4
"""Elements of a call that may differ in outputs too small for the share."""


Masks = Mapping[int, Tensor]
"""Masks of elements by output, in one call."""


def misplaced(one: Tensor, other: Tensor) -> Tensor:
    """The elements in which one of two outputs has a NaN or an Inf that the other has not."""
    return _kinds(one) != _kinds(other)


def _kinds(values: Tensor) -> Tensor:
    """0 where a value is finite, else which of NaN, Inf and -Inf it is."""
    if values.is_complex():
        return _kinds(values.real) + 4 * _kinds(values.imag)
    return values.isnan() * 1 + values.isposinf() * 2 + values.isneginf() * 3


def at_ties(
    calls: Sequence[Call],
    outputs: Collection[int],
    rerun: Rerun,
    *,
    only_misplaced: bool = False,
) -> tuple[list[Call], list[Masks]] | None:
    """The calls with the candidate's answers in place of the reference's and eager's wherever a tie
    explains the difference.

    Where eager alone differs, the reference replaces its answer; that is not its rounding.

    Args:
        calls: calls of a candidate.
        outputs: indices of the outputs that did not pass.
        rerun: see `eager_reruns`.
        only_misplaced: see `misplaced`; other differences stay.

    Returns:
        The calls, and the masks of the ties; None if nothing differs, or ties do not explain it.
    """
    masks: list[Masks] = []
    differences = []
    for call in calls:
        here = {}
        for index in outputs:
            c = call.candidate[index]
            e = call.eager[index]
            if c.shape != e.shape:
                return None
            mask = misplaced(c, e) if only_misplaced else _apart(call, index, c)
            num_apart = int(mask.sum())
            if num_apart > FEW and num_apart > _most(call, index) * mask.numel():
                return None
            here[index] = mask
            differences.append(_Difference(calls, call, index, mask))
        masks.append(here)
    if not _explained(calls, differences, rerun):
        return None
    return list(map(_settled, calls, masks)), masks


def _most(call: Call, index: int) -> float:
    """The largest share of an output's elements that may differ in a call."""
    e, c = call.eager[index], call.candidate[index]
    order, other = (in_double(output).abs().flatten().sort().values for output in (e, c))
    same = 1e-3 * float(order.nan_to_num(posinf=0.0).square().mean().sqrt())
    permuted = torch.allclose(
        order,
        other,
        rtol=1e-3,
        atol=same,
        equal_nan=True,
    )
    return MAX_OUT_OF_ORDER if permuted else MAX_SHARE


class _Difference:
    """The elements of one output of one call in which a candidate differs.

    Attributes:
        missing: elements whose answer no run has given yet.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        call: Call,
        index: int,
        mask: Tensor,
    ) -> None:
        self._call = call
        self._index = index
        self._mask = mask
        self._wanted = in_double(call.candidate[index][mask])
        self._bound = _rounding(call, index)[mask]
        self._misplaced = misplaced(call.candidate[index], call.eager[index])[mask]
        self.missing = mask[mask]
        self._twins = [
            number
            for number, other in enumerate(calls)
            if other.set_index == call.set_index
            and same_tensors(other.eager[index], call.eager[index])
        ]
        """The calls with the same inputs in which eager answers alike, this one among them."""

    def explain(self, answers: Outputs) -> None:
        """Remove the elements that a right candidate may answer so: with a step away from the
        reference.

        Args:
            answers: outputs of such a candidate in each call.
        """
        for twin in self._twins:
            answer = answers[twin][self._index]
            if answer.shape != self._mask.shape or not self.missing.any():
                continue
            value = in_double(answer[self._mask])
            near = (value - self._wanted).abs() <= self._bound
            if comparable(answer) and near.any():
                r = in_double(self._call.reference[self._index])
                jumps = (in_double(answer) - r).abs() > _typical(answer, r)
                near &= jumps[self._mask]
            if answer.dtype == self._call.eager[self._index].dtype:  # another has another range
                alike = ~misplaced(value, self._wanted)
                too_large = self._wanted.abs() > 2 * value.abs()
                near |= self._misplaced & alike & ~too_large
            self.missing &= ~near


def _explained(calls: Sequence[Call], differences: Sequence[_Difference], rerun: Rerun) -> bool:
    """Whether there are differing elements, and the candidate's answer to each is one that a right
    candidate may give.
    """
    num_missing = sum(len(difference.missing) for difference in differences)
    if not num_missing:
        return False
    num_fruitless = 0
    for answers in _answers(calls, rerun):
        for difference in differences:
            difference.explain(answers)
        before = num_missing
        num_missing = sum(int(difference.missing.sum()) for difference in differences)
        num_fruitless = num_fruitless + 1 if num_missing == before else 0
        if not num_missing or num_fruitless == MAX_FRUITLESS_RUNS:
            break
    return not num_missing


def _answers(calls: Sequence[Call], rerun: Rerun) -> Iterator[Outputs]:
    """Answers that a right candidate may give: eager's, the reference's, and those of the
    reruns.
    """
    yield [call.eager for call in calls]
    yield [call.reference for call in calls]
    yield from filter(None, map(rerun, range(_NUM_RUNS)))


def _typical(answer: Tensor, r: Tensor) -> float:
    """Sixteen times the median error of an answer, which rounding hardly ever exceeds."""
    used = (r != 0) & answer.isfinite() & r.isfinite()
    error = (in_double(answer) - r).abs()[used]
    return 16 * float(error.median()) if error.numel() else 0.0


def _rounding(call: Call, index: int) -> Tensor:
    """For each element, the distance up to which two answers are one: by rounding of the value, and
    of the typical element.
    """
    e = call.eager[index]
    if not comparable(e):
        return torch.zeros(e.shape, dtype=torch.float64)
    r = in_double(call.reference[index])
    largest = torch.maximum(r.abs(), in_double(call.candidate[index]).abs())
    return 32 * torch.finfo(e.dtype).eps * largest + _typical(in_double(e), r)


def _apart(call: Call, index: int, output: Tensor) -> Tensor:
    """The elements of an output that differ from the reference by more than rounding, or have NaN
    or Inf where eager has not; of integers and bools, those that differ from eager.
    """
    if not comparable(call.eager[index]):
        return call.eager[index] != output
    difference = in_double(output) - in_double(call.reference[index])
    apart = difference.abs() > _rounding(call, index)
    return apart | misplaced(output, call.eager[index])


def _settled(call: Call, masks: Masks) -> Call:
    reference = list(call.reference)
    eager = list(call.eager)
    for index, mask in masks.items():
        c = call.candidate[index]
        if comparable(c):
            flips = _apart(call, index, eager[index])
            if flips.sum() <= MAX_OUT_OF_ORDER * flips.numel():
                eager[index] = _with(eager[index], flips, reference[index])
        reference[index] = _with(reference[index], mask, c)
        eager[index] = _with(eager[index], mask, c)
    return replace(call, reference=reference, eager=eager)


def _with(tensor: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """A copy with other values at a mask, and the same strides."""
    changed = tensor.clone(memory_format=torch.preserve_format)
    changed[mask] = values[mask].to(tensor.dtype)
    return changed
