"""Time eager and candidates side by side at one point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from freezer.freezing.models.subject import Subject
from freezer.freezing.recipes.recipes import EAGER
from freezer.limits import SamplingPolicy
from freezer.runtime.frozen_model import FrozenModel
from freezer.runtime.input_sets import InputSet, distinct_at, on_device
from freezer.spec.inputs import bind
from freezer.timing.meters import meter_of
from freezer.timing.sampling import Sampling, sample


def time_at(point: Mapping[str, int], subject: Subject, candidates: Mapping[str, FrozenModel], policy: SamplingPolicy) -> Sampling:
    """Time eager and candidates, interleaved, at a point.

    Args:
        point: sizes of the named dims.
        subject: the model; a copy of it is the eager entrant.
        candidates: the candidates that passed the drift gate, by entrant name.
        policy: the sampling policy.
    """
    inputs = inputs_at(subject, point)
    eager = subject.fresh()
    for part in eager.modules():
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters()  # on a GPU, calls of a copy would flatten its weights each time
    entrants: dict[str, list[Callable[[], Any]]] = {EAGER: _calls(partial(without_grad, eager), subject, inputs)}
    entrants |= {recipe: _calls(model, subject, inputs) for recipe, model in candidates.items()}
    resets: dict[str, Callable[[], object]] = {}
    if subject.reset is not None:
        resets = {recipe: model.preserved[subject.reset] for recipe, model in candidates.items()}
        resets[EAGER] = partial(without_grad, getattr(eager, subject.reset))
    with meter_of(subject.device, policy) as meter:
        return sample(entrants, policy, resets, meter)


def without_grad(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function without gradients, as a frozen model is called."""
    with torch.no_grad():
        return function(*args, **kwargs)


def _calls(model: Callable[..., Any], subject: Subject, inputs: Sequence[InputSet]) -> list[Callable[[], Any]]:
    bound = [bind(subject.spec, item.cloned()) for item in inputs]  # each entrant gets its own copies, bound before timing
    return [partial(model, *args, **kwargs) for args, kwargs in bound]


def inputs_at(subject: Subject, point: Mapping[str, int]) -> list[InputSet]:
    """Distinct input sets of a subject at a point, on its device; see `distinct_at`."""
    return [on_device(item, subject.device) for item in distinct_at(subject.spec, subject.on_host.sets, point)]
