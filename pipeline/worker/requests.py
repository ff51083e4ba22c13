"""Requests that the driver sends to workers, and the results that they return."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field

from freezer.codec import OMIT_DEFAULT, JsonView, decode, frozen
from freezer.spec import SamplingPolicy
from pipeline.catalog import Entry
from pipeline.records import Failure, JudgeFindings, nested_json


@frozen
class BuildRequest:
    """Builds of one model and class, which share its captures.

    Attributes:
        builds: keys of the candidates, by recipe, in order. That of `portable` is for that class.
        source: key of the source, under which its weights are shared.
    """

    entry: Entry
    builds: Mapping[str, str]
    device_class: str
    num_threads: int
    store: str
    source: str = ""


@frozen
class JudgeRequest:
    """One judge.

    Attributes:
        builds: keys of the candidates, by recipe.
        failures: for every other recipe, why it has no candidate.
        inherits: whether the winner inherits the speed of the artifact that serves now.
        drift_max: error ratio above which it does not.
        confirms: whether a short timing confirms the inherited speed, as nothing waits for the
            machine.
        previous: digest of the image of the artifact that serves now; the worker sets it.
        further: whether to add the payloads that follow the verdict; the worker sets it.
        beside: the judge of `portable` for the same model, which shares its reference.
        source: key of the source, under which its weights are shared.
    """

    key: str
    entry: Entry
    builds: Mapping[str, str]
    device_class: str
    num_threads: int
    policy: SamplingPolicy
    campaign: str
    store: str
    failures: Mapping[str, str] = field(default_factory=dict)
    further_threads: tuple[int, ...] = ()
    inherits: bool = False
    drift_max: float = math.inf
    confirms: bool = False
    previous: str | None = None
    further: bool = True
    beside: JudgeRequest | None = None
    source: str = ""


@frozen
class JudgeResult(JudgeFindings):
    """Result of a judge. Its candidates are those that were judged.

    Attributes:
        reason: of the verdict, which is `failed` if there is no judgement.
        contest: why the winner cannot inherit a speed; empty if it does, or need not.
        has_artifact: whether the store contains an artifact folder to publish.
        left_out: why the others were not judged, by recipe: each ended a child that had it in hand.
        peak_bytes: of the child.
    """

    reason: str
    contest: str = field(default="", metadata=OMIT_DEFAULT)
    has_artifact: bool = False
    left_out: Mapping[str, Failure] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    host: JsonView | None = None
    peak_bytes: int = 0

    @classmethod
    def of_failure(cls, failure: Failure) -> JudgeResult:
        """Return the result of a judge that failed."""
        return cls(
            verdict="failed",
            reason=failure.message,
            failure=failure,
        )

    @classmethod
    def from_json(cls, data: JsonView) -> JudgeResult:
        """Return the result that `flat_json` wrote, also after a pass through JSON text."""
        return decode(cls, nested_json(data), origin="judge result")
