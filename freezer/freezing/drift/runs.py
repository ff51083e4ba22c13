"""Runs of a subject: single calls, a sequence of calls, and one call after a reset; and reruns of
eager with operands that change at random by a few units in the last place (see `ties`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from freezer.codec import encode, frozen
from freezer.errors import JudgeError, described, first_line
from freezer.freezing.drift.drift_report import CallKind
from freezer.freezing.drift.float64_mode import Widening, own_dtype, widening
from freezer.freezing.models import RESET, Kwargs, NamedTensors, Outputs, Subject, call_source
from freezer.runtime.input_sets import Draws
from freezer.runtime.tensors import HALVES, comparable, flatten, in_double

SEQUENCE = (0, 1, 0, 2)
"""Input sets of the calls on one instance; state that freezing baked in shows only there."""

ULPS = 8
"""Largest change of an operand in units of the last place, as a sum of many loses several; in half
precision, which is summed in float32, it is one."""

Rerun = Callable[[int], Outputs | None]
"""Outputs of eager in each call, with operands changed by a seed; None if it does not run."""


@frozen
class Runner:
    """One instance to compare.

    Attributes:
        call: takes input tensors by path, returns the output tensors in order.
        reset: the subject's reset method, if it has one.
    """

    call: Callable[[NamedTensors], list[Tensor]]
    reset: Callable[[], object] | None = None


Fresh = Callable[[], Runner]
"""Returns a runner in its initial state."""


@frozen
class Call:
    """The output tensors of one call by the reference, by eager, and by the candidate once it has
    run.

    Attributes:
        noise_rmse: for each output, the largest difference between runs of eager, of integers and
            bools in all calls; 0 for a deterministic model.
    """

    kind: CallKind
    set_index: int
    reference: Sequence[Tensor]
    eager: Sequence[Tensor]
    noise_rmse: Sequence[float]
    candidate: Sequence[Tensor] = ()


def schedule(subject: Subject) -> list[tuple[CallKind, int]]:
    """Kind and index of the input set of every call: the single calls, the sequence, and with a
    reset method a last call.

    The sequence has the first set between others, so that state shows as a difference.
    """
    last = len(subject.sets) - 1
    calls: list[tuple[CallKind, int]] = [("single", index) for index in range(last + 1)]
    calls += [("sequence", min(index, last)) for index in SEQUENCE]
    if subject.reset is not None:
        calls.append(("after-reset", 0))
    return calls


def run_calls(
    fresh: Fresh,
    subject: Subject,
    *,
    stateful: bool,
) -> Iterator[list[Tensor]]:
    """Make the calls of `schedule` one by one; yield the output tensors of each.

    Each single call, the sequence and the call after it start from the initial state. With a reset
    method one instance is reset.

    Args:
        fresh: returns a runner in its initial state.
        subject: the subject, whose sets are the inputs.
        stateful: whether a subject without a reset method gets a fresh runner for each call.
    """
    runner = fresh()
    previous = None
    for kind, index in schedule(subject):
        if previous and not kind == previous == "sequence":
            if runner.reset is not None:
                runner.reset()
            elif stateful:
                runner = fresh()
        yield copied(runner.call(subject.sets[index].tensors))
        previous = kind


def copied(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Copies with the same strides, because a later call may write into an output that aliases a
    buffer.
    """
    return [leaf.detach().clone(memory_format=torch.preserve_format) for leaf in leaves]


def source_runner(
    model: nn.Module,
    subject: Subject,
    mode: Widening | None = None,
) -> Runner:
    """A runner of a copy of the source model; in a mode its inputs become float64, too."""

    def run(tensors: NamedTensors) -> list[Tensor]:
        given = {}
        for name, tensor in tensors.items():
            wide = mode is not None and comparable(tensor)
            copy = tensor.clone()  # a model may write into its inputs
            given[name] = in_double(copy) if wide else copy
        with widening(mode):
            result = call_source(model, subject.spec, given)
        structure, leaves = flatten(result)
        if mode is None and structure != subject.structure:
            raise JudgeError(
                f"{subject.name}: the structure of the result, or a constant in it, changes from"
                f" call to call; got {encode(structure)}, expected {encode(subject.structure)};"
                " return tensors instead",
                code="CP-OUTPUTS",
            )
        return [leaf.cpu() for leaf in leaves]  # outputs are compared on the CPU

    reset = partial(_reset, model, subject, mode) if subject.reset else None
    return Runner(call=run, reset=reset)


def _reset(
    model: nn.Module,
    subject: Subject,
    mode: Widening | None,
) -> None:
    try:
        with torch.no_grad(), widening(mode):
            getattr(model, str(subject.reset))()
            if mode is not None:
                model.double()  # a reset may create buffers of the source's own dtype
    except Exception as error:
        raise JudgeError(
            f"{subject.name}: {subject.reset}() raises {described(error)}", code=RESET
        ) from error


def run_float64(
    subject: Subject,
    eagers: Outputs,
    *,
    stateful: bool,
) -> tuple[Outputs | None, str | None]:
    """The first calls in float64, as many as eager's, or None and why they cannot run."""
    inputs = [getattr(torch, spec.dtype) for spec in subject.spec.tensors]
    mode = Widening(own_dtype(subject.model, inputs))

    def fresh() -> Runner:
        model = subject.fresh().double()
        mode.widen_attributes(model)
        return source_runner(model, subject, mode)

    try:
        results = list(islice(run_calls(fresh, subject, stateful=stateful), len(eagers)))
    except Exception as error:
        return None, f"float64 does not run: {type(error).__name__}: {first_line(error)}"
    if mode.narrow is not None:
        return None, f"float64 does not run throughout: {mode.narrow}"
    for r, e in zip(chain(*results), chain(*eagers), strict=True):
        if r.shape != e.shape:
            return None, f"float64 gives shape {list(r.shape)}, eager {list(e.shape)}"
        wanted = torch.complex128 if e.is_complex() else torch.float64
        if comparable(e) and r.dtype != wanted:
            return None, f"forward casts to {r.dtype}, so it has no float64 output"
    return results, None


def eager_reruns(
    subject: Subject,
    *,
    stateful: bool,
    num_calls: int | None = None,
) -> Rerun:
    """Reruns of a subject's eager model with changed operands, of all calls or the first ones."""

    def fresh(draws: Draws) -> Runner:
        runner = source_runner(subject.fresh(), subject)

        def call(tensors: NamedTensors) -> list[Tensor]:
            with _Changing(draws):
                return runner.call(tensors)

        return Runner(
            call=call,
            reset=runner.reset,
        )

    def rerun(seed: int) -> Outputs | None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                calls = run_calls(partial(fresh, Draws(seed)), subject, stateful=stateful)
                return list(islice(calls, num_calls))
            except Exception:  # a changed index may be out of range
                return None

    return rerun


class _Changing(TorchDispatchMode):
    """Change each floating-point operand of each operator at random by a few units in its last
    place, see ULPS.
    """

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._draws = draws

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Kwargs = None,
    ) -> Any:
        """Run an operator with changed operands, unless its result shares memory with one
        of them.
        """
        schema = getattr(func, "_schema", None)  # a higher-order operator has none
        values = (*schema.arguments, *schema.returns) if schema else ()
        if schema and all(value.alias_info is None for value in values):
            change = partial(_changed, self._draws)
            args, kwargs = pytree.tree_map(change, (tuple(args), kwargs))
        return func(*args, **(kwargs or {}))


def _changed(draws: Draws, value: Any) -> Any:
    if not isinstance(value, Tensor) or not comparable(value) or value.layout is not torch.strided:
        return value
    most = 1 if value.dtype in HALVES else ULPS
    ulps = draws.integers(-most, most + 1, value.shape).to(value.dtype).to(value.device)
    return value * (1 + torch.finfo(value.dtype).eps * ulps)
