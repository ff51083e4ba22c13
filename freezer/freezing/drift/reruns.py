"""Reruns of eager with operands that change at random by a few units in the last place; see
`ties`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from freezer.compare.tensor_values import HALVES, comparable
from freezer.freezing.drift.runs import Runner, run_calls, source_runner
from freezer.freezing.models import Subject

ULPS = 8
"""Largest change of an operand in units of the last place, as a sum of many loses several; in half
precision, which is summed in float32, it is one."""

Rerun = Callable[[int], Sequence[Sequence[Tensor]] | None]
"""Outputs of eager in each call, with operands changed by a seed; None if it does not run."""


def eager_reruns(
    subject: Subject,
    *,
    stateful: bool,
    num_calls: int | None = None,
) -> Rerun:
    """Reruns of a subject's eager model with changed operands, of all calls or the first ones."""

    def fresh() -> Runner:
        runner = source_runner(subject.fresh(), subject)

        def call(tensors: Mapping[str, Tensor]) -> list[Tensor]:
            with _Changing():  # type: ignore[no-untyped-call]
                return runner.call(tensors)

        return Runner(call=call, reset=runner.reset)

    def rerun(seed: int) -> Sequence[Sequence[Tensor]] | None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                calls = run_calls(fresh, subject, stateful=stateful)
                return list(islice(calls, num_calls))
            except Exception:  # a changed index may be out of range
                return None

    return rerun


class _Changing(TorchDispatchMode):
    """Change each floating-point operand of each operator at random by a few units in its last
    place, see ULPS.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator with changed operands, unless its result shares memory with one
        of them.
        """
        named = dict(kwargs or {})
        schema = getattr(func, "_schema", None)  # a higher-order operator has none
        if schema is None:
            return func(*args, **named)
        values = (*schema.arguments, *schema.returns)
        if any(value.alias_info is not None for value in values):
            return func(*args, **named)
        return func(
            *pytree.tree_map(_changed, tuple(args)),
            **pytree.tree_map(_changed, named),
        )


def _changed(value: Any) -> Any:
    if not isinstance(value, Tensor) or not comparable(value) or value.layout is not torch.strided:
        return value
    most = 1 if value.dtype in HALVES else ULPS
    ulps = torch.randint(
        -most,
        most + 1,
        value.shape,
        device=value.device,
    )
    eps = torch.finfo(value.dtype).eps
    return value * (1 + eps * ulps.to(value.dtype))
