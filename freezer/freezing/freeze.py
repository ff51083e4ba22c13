"""Freeze one model on this machine: capture -> lower -> validate -> package. READ THIS FIRST.

    subject     the model in its initial state, its input spec and its input sets  models/subject.py
    candidates  for each recipe: capture the graph and lower it to payloads  candidates/build_all.py
    judgement  measure drift against float64 and latency against eager; decide the verdict  validation/judge.py
                 add payloads for further thread counts and for slow sizes  validation/other_payloads.py
    artifact  write payloads, golden files, evidence and the manifest to one folder  packaging/assemble.py

`pipeline/run.py` takes the same steps for a whole catalog, on many machines.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from freezer.artifact import Artifact
from freezer.errors import FreezeError, SpecError, UsageError, expected_names
from freezer.files import check_folder
from freezer.freezing.candidates import build, build_all
from freezer.freezing.judging import Judgement, TaskMetric, judge
from freezer.freezing.models import (
    Dims,
    ExampleInputs,
    Subject,
    SubjectOptions,
    check_mode,
    example_spec,
    generators_kept,
    load_source,
    own_spec,
    prepare,
    to_device,
    weights_digest,
)
from freezer.freezing.packaging import assemble, clear_evidence, evidence_of, write_refused
from freezer.freezing.payload_sets import with_other_payloads
from freezer.freezing.recipes import KEPT_EAGER
from freezer.freezing.sources import Source
from freezer.freezing.target import Target, class_here, resolve_device, target_here
from freezer.hardware import PORTABLE, counts_within, thread_budget
from freezer.runtime.tensor_files import read_samples
from freezer.runtime.tensors import dtypes_of, program_tensors
from freezer.spec import InputSpec, Limits, Objective, SamplingPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
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
        policy: how long and how often to sample latency.
        task_metric: the caller's own quality measure; reported, not gated.
        preserve: attributes, methods and submodule attributes (`sub.attr`) that the frozen model
            keeps.
        reset: the method, without arguments, that clears the model's state. The judge calls it
            between input sets.
        device: the device to freeze on, such as `cuda:1`. With `device_class="auto"` its class is
            used. By default, for a CUDA class, the GPU that holds the model if it is of that class,
            or else the current one.
    """

    name: str = "model"
    recipes: Iterable[str] = ("auto",)
    device_class: str = "auto"
    num_threads: int | Sequence[int] | None = None
    points: Sequence[Mapping[str, int]] = ()
    limits: Limits = field(default_factory=Limits)
    objective: Objective = "p50"
    policy: SamplingPolicy = field(default_factory=SamplingPolicy)
    task_metric: TaskMetric | None = None
    preserve: Sequence[str] = ()
    reset: str | None = None
    device: str | None = None

    def for_subject(self, device: torch.device, *, fill_up: bool = False) -> SubjectOptions:
        """The options of `prepare` among these."""
        return SubjectOptions(
            preserve=self.preserve,
            reset=self.reset,
            points=self.points,
            fill_up=fill_up,
            device=device,
        )


DEFAULTS = FreezeOptions()


@dataclass(frozen=True, kw_only=True)
class FreezeResult:
    """The result of freezing one model on this machine.

    Attributes:
        verdict: published, kept-eager, rejected, failed or unstable (docs/contract.md).
        reason: one sentence for people.
        artifact: the folder that was written; the portable or captured one for kept-eager; None if
            nothing was written.
        judgement: for the device class; None if no candidate was built.
        failures: the error message of each recipe that made no candidate, or why it was skipped.
        tracebacks: the full tracebacks of those errors.
        evidence: folder `OUT.evidence`, with a folder for each class that got no artifact or has
            failures; None if there is none.
    """

    verdict: str
    reason: str
    artifact: Artifact | None = None
    judgement: Judgement | None = field(default=None, repr=False)
    failures: Mapping[str, str] = field(default_factory=dict)
    tracebacks: Mapping[str, str] = field(default_factory=dict, repr=False)
    evidence: Path | None = None


def freeze(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    out: str | Path,
    dims: Dims | None = None,
    options: FreezeOptions = DEFAULTS,
) -> FreezeResult:
    """Freeze a model for this machine and write its artifact folder.

    Args:
        model: an `nn.Module` in eval mode. It is copied, never changed.
        example_inputs: inputs by parameter name, or positional: a tensor or a sequence. A value may
            be a tuple, list or dict of values. Constants (None, numbers, strings) are baked in.
        out: the folder to write; new or empty. `OUT.evidence` beside it gets the measurements, code
            and errors of what is not in the artifact, in a folder for each class, which is
            replaced.
        dims: the dims that may vary, by input and axis: `{"x": {0: Dim(name="batch", min=1,
            max=16)}}`. A tensor within another value is named by its path, `state.0`.
        options: see `FreezeOptions`.

    Raises:
        UsageError: `out`, the device class, the device, a recipe or the objective is invalid.
        SpecError: an input, a dim or a name to preserve is invalid.
        JudgeError: the eager model does not run.
    """
    check_folder(Path(out), "out")
    check_mode(model)
    spec, example = example_spec(example_inputs, dims or {})
    device_class, device = resolve_device(
        model, options.device_class, options.device, example.values()
    )
    with generators_kept():
        subject = prepare(
            options.name, model, spec, [example], options.for_subject(device, fill_up=True)
        )
    source = f"{type(model).__module__}.{type(model).__qualname__}"
    return _freeze_subject(
        subject, device_class, device, out=Path(out), source=source, options=options
    )


def _freeze_subject(
    subject: Subject,
    device_class: str,
    device: torch.device,
    *,
    out: Path,
    source: str,
    options: FreezeOptions,
) -> FreezeResult:
    """Freeze for a device class; if nothing is faster than eager, write the unfrozen program that
    serves instead.
    """
    if options.objective not in get_args(Objective):
        raise UsageError(
            "objective: the name is unknown;"
            f" {expected_names(options.objective, get_args(Objective))}"
        )
    target = _target(subject, device_class, device, options.num_threads)
    provenance = {"source": source, "weights": weights_digest(subject.model)}
    clear_evidence(out, (target.device_class.name, PORTABLE))
    with tempfile.TemporaryDirectory(prefix="coldpress-") as work, generators_kept():
        subject = to_device(subject, target.device)
        result = _freeze_for_target(subject, target, Path(work), out, options, provenance)
        if result.verdict != "kept-eager":
            return result
        if target.device_class.kind == "cuda":
            artifact, why = keep_eager(
                subject,
                target,
                dest=out,
                limits=options.limits,
                policy=options.policy,
                provenance=provenance,
                failures=result.failures,
            )
            return replace(result, reason=f"{result.reason}; {why}", artifact=artifact)
        portable = target_here(PORTABLE, target.thread_counts)
        return _with_portable(
            result, _freeze_for_target(subject, portable, Path(work), out, options, provenance)
        )


def _target(
    subject: Subject,
    device_class: str,
    device: torch.device,
    num_threads: int | Sequence[int] | None,
) -> Target:
    """The target of a freeze, by default with this machine's class for the dtypes of the model, and
    its thread counts.
    """
    if device_class == "auto":
        device_class = class_here(dtypes_of(program_tensors(subject.model)))
    own = counts_within(thread_budget(torch.get_num_threads()))
    return target_here(
        device_class,
        own if num_threads is None else num_threads,
        device if device.type == "cuda" else None,
    )


def _freeze_for_target(
    subject: Subject,
    target: Target,
    work: Path,
    out: Path,
    options: FreezeOptions,
    provenance: Mapping[str, str],
) -> FreezeResult:
    """Build every recipe for one target, judge the candidates, and write the winner."""
    builds = build_all(subject, target, options.recipes, work, options.limits)
    result = FreezeResult(
        verdict="kept-eager",
        reason="no recipe other than eager was requested",
        failures=builds.failures,
        tracebacks=builds.tracebacks,
    )
    if not builds.candidates and not builds.errors:
        return result
    if not builds.candidates:
        reason = "; ".join(f"{recipe}: {error}" for recipe, error in builds.errors.items())
        return _with_evidence(replace(result, verdict="failed", reason=reason), target, work, out)
    try:
        judgement = judge(
            subject,
            builds.candidates,
            target,
            limits=options.limits,
            policy=options.policy,
            objective=options.objective,
            task_metric=options.task_metric,
        )
    except FreezeError:
        _with_evidence(result, target, work, out)
        raise
    judgement = with_other_payloads(subject, judgement, target, work)
    artifact = None
    if judgement.winner is not None:
        artifact = assemble(
            subject, judgement, target, dest=out, provenance=provenance, failures=result.failures
        )
    result = replace(
        result,
        verdict=judgement.verdict,
        reason=judgement.reason,
        artifact=artifact,
        judgement=judgement,
    )
    return _with_evidence(result, target, work, out)


def _with_evidence(result: FreezeResult, target: Target, work: Path, out: Path) -> FreezeResult:
    """Write the evidence of what is not in the artifact, and add its folder to the result."""
    if result.artifact is not None and not result.tracebacks:
        return result
    name, dest = target.device_class.name, evidence_of(out)
    folders = {folder.name.removeprefix(f"{name}-"): folder for folder in work.glob(f"{name}-*")}
    stage = Path(tempfile.mkdtemp(dir=work))
    write_refused(
        None if result.artifact else result.judgement,
        folders,
        result.tracebacks,
        stage,
        dest / name,
    )
    return replace(result, evidence=dest)


def _with_portable(result: FreezeResult, portable: FreezeResult) -> FreezeResult:
    """The result of a class that keeps eager, with the portable artifact that serves it."""
    serves = (
        "the portable program serves"
        if portable.artifact
        else f"no portable program: {portable.reason}"
    )
    return replace(
        result,
        reason=f"{result.reason}; {serves}",
        artifact=portable.artifact,
        failures={**result.failures, **portable.failures},
        tracebacks={**result.tracebacks, **portable.tracebacks},
        evidence=result.evidence or portable.evidence,
    )


def keep_eager(
    subject: Subject,
    target: Target,
    *,
    dest: Path,
    limits: Limits,
    policy: SamplingPolicy,
    provenance: Mapping[str, str],
    failures: Mapping[str, str],
) -> tuple[Artifact | None, str]:
    """Write the artifact of a CUDA class whose verdict is `kept-eager`: the captured program, not
    frozen, on the GPU.

    For a CPU class the portable artifact serves instead (docs/contract.md, Verdicts).

    Args:
        subject: the model.
        target: a CUDA class.
        limits, policy: see `judge`.
        dest, provenance, failures: see `assemble`.

    Returns:
        The artifact and a sentence. The artifact is None if the model cannot be captured or fails
        the drift gate.
    """
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}-", dir=dest.parent) as folder:
        try:
            candidate = build(subject, KEPT_EAGER, target, Path(folder))
        except FreezeError as error:
            return None, f"no captured program serves: {error}"
        judgement = judge(
            subject, [candidate], target, limits=limits, policy=policy, on_drift_alone=True
        )
        if judgement.winner is None:
            return None, f"no captured program serves: {judgement.reason}"
        kept = replace(judgement, verdict="kept-eager")
        artifact = assemble(
            subject, kept, target, dest=dest, provenance=provenance, failures=failures
        )
    return artifact, f"the captured program serves ({candidate.capture})"


def freeze_source(
    source: Source,
    *,
    spec: InputSpec | None,
    samples: Path | None,
    out: Path,
    options: FreezeOptions = DEFAULTS,
) -> FreezeResult:
    """Freeze the model that a source names, for the command `coldpress freeze`.

    Args:
        source: see `sources.parse_source`.
        spec: the input spec; None to use the source's own, or the shapes of the samples.
        samples: a file of real input sets.
        out: the folder to write; new or empty.
        options: see `FreezeOptions`. A source is loaded onto the CPU, so `device_class="auto"` is
            this machine's CPU class unless `device` names a GPU.

    Raises:
        SourceError: the model cannot be loaded.
        UsageError, SpecError, JudgeError: see `freeze`.
    """
    check_folder(out, "out")
    device_class, device = resolve_device(None, options.device_class, options.device)
    subject = load_subject(source, options.name, spec, samples, options.for_subject(device))
    return _freeze_subject(
        subject, device_class, device, out=out, source=str(source), options=options
    )


def load_subject(
    source: Source,
    name: str,
    spec: InputSpec | None,
    samples: Path | None,
    options: SubjectOptions | None = None,
) -> Subject:
    """Load the model that a source names, with its input spec and input sets.

    Args:
        source: see `sources.parse_source`.
        name: model name.
        spec: the input spec; None to use the source's own, or the shapes of the samples.
        samples: a file of real input sets.
        options: defaults to SubjectOptions().

    Raises:
        SourceError, SpecError, JudgeError: the model, its samples or its inputs are invalid.
    """
    model = load_source(source)
    sets = read_samples(samples) if samples else []
    spec = spec or own_spec(model) or (example_spec(sets[0], {})[0] if sets else None)
    if spec is None:
        raise SpecError(
            f"source {source} does not declare its inputs; declare them (`inputs:` in a catalog,"
            " `--inputs` for `coldpress freeze`), or give samples"
        )
    return prepare(name, model, spec, sets, options)
