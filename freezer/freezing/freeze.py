"""Freeze one model on this machine. READ THIS FIRST.

    prepare              models        the model in its initial state, its inputs and their sets
    build_all            candidates    for each recipe: capture the graph, lower it to payloads
    open_session, judge  judging       drift against float64, latency against eager, verdict
    with_other_payloads  payload_sets  payloads for further thread counts and for slow sizes
    assemble             packaging     payloads, golden files, evidence and manifest in one folder

`pipeline/run.py` takes the same steps for a whole catalog, on many machines.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from freezer.artifact import Artifact
from freezer.errors import FreezeError, UsageError, expected_names
from freezer.files import check_folder
from freezer.freezing.candidates import build, build_all
from freezer.freezing.freeze_options import DEFAULTS, FreezeOptions, FreezeResult
from freezer.freezing.judging import Session, judge, open_session
from freezer.freezing.models import (
    Dims,
    ExampleInputs,
    Subject,
    check_mode,
    example_spec,
    generators_kept,
    prepare,
    to_device,
)
from freezer.freezing.packaging import assemble, clear_evidence, evidence_of, write_refused
from freezer.freezing.payload_sets import with_other_payloads
from freezer.freezing.recipes import KEPT_EAGER
from freezer.freezing.target import Target, class_here, resolve_device, target_here
from freezer.hardware import PORTABLE, counts_within, thread_budget
from freezer.runtime.tensors import dtypes_of, program_tensors
from freezer.spec import Limits, Objective, SamplingPolicy

__all__ = [
    "FreezeOptions",
    "FreezeResult",
    "freeze",
    "freeze_subject",
    "freeze_target",
    "keep_eager",
]


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
        model,
        options.device_class,
        options.device,
        example.values(),
    )
    with generators_kept():
        for_subject = options.for_subject(device, fill_up=True)
        subject = prepare(options.name, model, spec, [example], for_subject)
    source = f"{type(model).__module__}.{type(model).__qualname__}"
    target = freeze_target(subject, device_class, device, options)
    return freeze_subject(subject, target, out=Path(out), source=source, options=options)


def freeze_subject(
    subject: Subject, target: Target, *, out: Path, source: str, options: FreezeOptions
) -> FreezeResult:
    """Freeze for a target; if nothing is faster than eager, write the unfrozen program that serves
    instead.
    """
    portable = target_here(PORTABLE, target.thread_counts)
    clear_evidence(out, (target.device_class.name, PORTABLE))
    with tempfile.TemporaryDirectory(prefix="coldpress-") as work, generators_kept():
        freezing = _Freezing(
            subject=to_device(subject, target.device),
            options=options,
            provenance={"source": source},
            work=Path(work),
            out=out,
        )
        result = freezing.result(target)
        if result.verdict != "kept-eager":
            return result
        if target.device_class.kind == "cuda":
            return freezing.with_captured(result, target)
        return _with_portable(result, freezing.result(portable))


def freeze_target(
    subject: Subject, device_class: str, device: torch.device, options: FreezeOptions
) -> Target:
    """The target of a freeze, by default with this machine's class for the dtypes of the model, and
    its thread counts.
    """
    if options.objective not in get_args(Objective):
        expected = expected_names(options.objective, get_args(Objective))
        raise UsageError(f"objective: the name is unknown; {expected}")
    if device_class == "auto":
        device_class = class_here(dtypes_of(program_tensors(subject.model)))
    counts = options.num_threads
    if counts is None:
        counts = counts_within(thread_budget(torch.get_num_threads()))
    return target_here(device_class, counts, device if device.type == "cuda" else None)


@dataclass(frozen=True, kw_only=True)
class _Freezing:
    """What is the same for every target of a freeze.

    Attributes:
        subject: the model, on the device of the targets.
        provenance: source of the model.
        work: folder for candidates.
        out: folder to write.
    """

    subject: Subject
    options: FreezeOptions
    provenance: Mapping[str, str]
    work: Path
    out: Path

    def result(self, target: Target) -> FreezeResult:
        """Build every recipe for one target, judge the candidates, and write the winner."""
        options = self.options
        builds = build_all(
            self.subject,
            target,
            options.recipes,
            self.work,
            options.limits,
        )
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
            return self._with_evidence(replace(result, verdict="failed", reason=reason), target)
        try:
            session = self._session(target)
            judgement = judge(session, builds.candidates)
        except FreezeError:
            self._with_evidence(result, target)
            raise
        judgement = with_other_payloads(session, judgement, self.work)
        artifact = None
        if judgement.winner is not None:
            artifact = assemble(
                session,
                judgement,
                dest=self.out,
                provenance=self.provenance,
                failures=result.failures,
            )
        result = replace(
            result,
            verdict=judgement.verdict,
            reason=judgement.reason,
            judgement=judgement,
            artifact=artifact,
        )
        return self._with_evidence(result, target)

    def _session(self, target: Target) -> Session:
        options = self.options
        return open_session(
            self.subject,
            target,
            limits=options.limits,
            policy=options.policy,
            objective=options.objective,
            task_metric=options.task_metric,
        )

    def with_captured(self, result: FreezeResult, target: Target) -> FreezeResult:
        """The result of a class that keeps eager, with the captured program that serves it."""
        artifact, serves = keep_eager(
            self.subject,
            target,
            limits=self.options.limits,
            policy=self.options.policy,
            dest=self.out,
            provenance=self.provenance,
            failures=result.failures,
        )
        return replace(result, reason=f"{result.reason}; {serves}", artifact=artifact)

    def _with_evidence(self, result: FreezeResult, target: Target) -> FreezeResult:
        """Write the evidence of what is not in the artifact, and add its folder to the result."""
        if result.artifact is not None and not result.tracebacks:
            return result
        name, dest = target.device_class.name, evidence_of(self.out)
        builds = {
            folder.name.removeprefix(f"{name}-"): folder for folder in self.work.glob(f"{name}-*")
        }
        judgement = None if result.artifact else result.judgement
        stage = Path(tempfile.mkdtemp(dir=self.work))
        write_refused(
            judgement,
            builds,
            result.tracebacks,
            stage,
            dest / name,
        )
        return replace(result, evidence=dest)


def _with_portable(result: FreezeResult, portable: FreezeResult) -> FreezeResult:
    """The result of a class that keeps eager, with the portable artifact that serves it."""
    serves = "the portable program serves"
    if portable.artifact is None:
        serves = f"no portable program: {portable.reason}"
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
    limits: Limits,
    policy: SamplingPolicy,
    dest: Path,
    provenance: Mapping[str, str],
    failures: Mapping[str, str],
) -> tuple[Artifact | None, str]:
    """Write the artifact of a CUDA class whose verdict is `kept-eager`: the captured program, not
    frozen, on the GPU.

    For a CPU class the portable artifact serves instead (docs/reference/contract.md, Verdicts).

    Args:
        subject: the model, on the device of the target.
        target: target of a CUDA class.
        limits, policy: see `open_session`.
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
        session = open_session(
            subject,
            target,
            limits=limits,
            policy=policy,
            on_drift_alone=True,
        )
        judgement = judge(session, [candidate])
        if judgement.winner is None:
            return None, f"no captured program serves: {judgement.reason}"
        judgement = replace(judgement, verdict="kept-eager")
        artifact = assemble(session, judgement, dest=dest, provenance=provenance, failures=failures)
    return artifact, f"the captured program serves ({candidate.capture})"
