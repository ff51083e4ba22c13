"""Options and result of a freeze."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

import torch

from freezer.artifact import Artifact
from freezer.codec import frozen
from freezer.freezing.choices import check_consented, check_used
from freezer.freezing.judging import Judgement, TaskMetric
from freezer.freezing.models import SubjectOptions
from freezer.spec import Accuracy, Limits, Objective, Point, SamplingPolicy, check_consent


@frozen
class FreezeOptions:
    """Options of one freeze.

    Attributes:
        name: model name in the manifest.
        recipes: names of recipes; `auto` selects those worth trying on any model, `all` selects
            every one.
        device_class: the class to freeze for. `auto` is the class of the model's GPU, or else this
            machine's CPU class.
        num_threads: thread counts to build, judge and serve with. The verdict is taken at the
            first; the winner is built for the others too, and its payloads are kept where they are
            faster. By default torch's own count, at most the CPUs of this process, and the powers
            of two below.
        points: sizes by dim name, `[{"batch": 1}, {"batch": 8}]`: try a payload for each, beside
            the one for all sizes. A dim that a point omits takes its minimum. The verdict is taken
            at the first point, by default the minimum of every dim.
        limits: speedup, drift, latency and size limits that a candidate must meet.
        objective: what the winner is best in, of the candidates that meet the limits: `p50`
            (latency), `p95`, `throughput` or `size`.
        precision: lower precisions that are consented to: `bf16`, `int8`, or on GPUs `bf16`,
            `fp16` and `tf32`. A candidate competes if it keeps the budget `accuracy`. Float32
            always competes.
        accuracy: the budget, and real samples that neither calibration nor search sees.
        policy: how long and how often to sample latency.
        task_metric: the caller's own quality measure; reported, not gated.
        preserve: attributes, methods and submodule attributes (`sub.attr`) that the frozen model
            keeps.
        reset: the method, without arguments, that clears the model's state. The judge calls it
            between input sets.
        device: the device to freeze on, such as `cuda:1`. With `device_class="auto"` its class is
            used. By default, for a CUDA class, the GPU that holds the model if it is of that class,
            or else the current one.
        progress: called with each line of progress. By default they are printed on a terminal.
    """

    name: str = "model"
    recipes: Iterable[str] = ("auto",)
    device_class: str = "auto"
    num_threads: int | Sequence[int] | None = None
    points: Sequence[Point] = ()
    limits: Limits = field(default_factory=Limits)
    objective: Objective = "p50"
    precision: Sequence[str] = ()
    accuracy: Accuracy | None = None
    policy: SamplingPolicy = field(default_factory=SamplingPolicy)
    task_metric: TaskMetric | None = None
    preserve: Sequence[str] = ()
    reset: str | None = None
    device: str | None = None
    progress: Callable[[str], object] | None = None

    def for_subject(self, device: torch.device, *, fill_up: bool = False) -> SubjectOptions:
        """The options of `prepare` among these.

        Raises:
            SpecError, UsageError: lower precision has no budget that can be judged, or no recipe;
                code CP-ACCURACY.
        """
        check_consent(self.precision, self.accuracy)
        check_consented(self.recipes, self.precision)
        check_used(self.recipes, self.precision)
        return SubjectOptions(
            preserve=self.preserve,
            reset=self.reset,
            points=self.points,
            fill_up=fill_up,
            device=device,
            accuracy=self.accuracy,
            search_path=(str(Path.cwd()),),
        )


DEFAULTS = FreezeOptions()


@frozen
class FreezeResult:
    """The result of freezing one model on this machine.

    Attributes:
        verdict: published, kept-eager, rejected, failed or unstable (docs/reference/contract.md).
        reason: one sentence for people.
        artifact: the folder that was written; the portable or captured one for kept-eager, and for
            unstable the portable one or one whose speed was not measured; None if nothing was
            written.
        judgement: for the device class; None if no candidate was built.
        failures: the error message of each recipe that made no candidate.
        evidence: folder `OUT.evidence`, with a folder for each class that got no artifact or has
            failures; None if there is none.
    """

    verdict: str
    reason: str
    artifact: Artifact | None = None
    judgement: Judgement | None = field(default=None, repr=False)
    failures: Mapping[str, str] = field(default_factory=dict)
    evidence: Path | None = None
