"""Options that an engine applies when it opens a payload, so that trying others needs no build.

Before the judge times the candidates, an engine's candidate is timed beside itself with each of these options, in a share of the
time limit. An option that is clearly faster (timing/halving.py) is kept if the candidate passes the drift gate with it. The samples
that select an option are not those that decide the verdict, so the winner's figures are not biased.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from freezer.freezing.candidates.candidate import Candidate
from freezer.freezing.models.subject import Subject
from freezer.freezing.validation.timed_cells import time_variants
from freezer.limits import SamplingPolicy
from freezer.timing.sampling import Sampling

logger = logging.getLogger("coldpress")

OPTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "onnxruntime": {
        "without spinning": {"session": {"session.intra_op.allow_spinning": "0"}},
        "without NCHWc": {"session": {"optimization.disable_specified_optimizers": "NchwcTransformer"}},
        "with dynamic blocks": {"session": {"session.dynamic_block_base": "4"}},
    }
}
"""By kind of payload: a name for people, and what is added to the recipe's settings."""


def tuned(subject: Subject, candidate: Candidate, num_threads: int, policy: SamplingPolicy) -> Candidate:
    """The candidate with the option that makes it clearly faster at the deciding point; unchanged if none does.

    Args:
        subject: the model.
        candidate: passes the drift gate; of any kind.
        num_threads: the deciding thread count.
        policy: of the judge.
    """
    variants = {
        f"{candidate.recipe}, {name}": replace(candidate, settings=_added(candidate.settings, option))
        for name, option in OPTIONS.get(candidate.lowering, {}).items()
    }
    if not variants:
        return candidate
    named = [replace(variant, recipe=name) for name, variant in variants.items()]
    name = fastest(time_variants(subject, [candidate, *named], num_threads, policy), candidate.recipe, [*variants])
    if name == candidate.recipe:
        return candidate
    logger.info("%s is faster than %s", name, candidate.recipe)
    return variants[name]


def fastest(sampling: Sampling, default: str, others: list[str]) -> str:
    """The entrant to take: the default, unless it was stopped as clearly slower than another one."""
    left = [name for name in others if not sampling.stopped(name)]
    if not sampling.stable or not sampling.stopped(default) or not left:
        return default
    return min(left, key=lambda name: statistics.median(statistics.median(block) for block in sampling.samples_ms[name]))


def _added(settings: Mapping[str, Any], option: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the entries of an option, which may be mappings, added."""
    return {**settings, **{name: {**settings.get(name, {}), **entries} for name, entries in option.items()}}
