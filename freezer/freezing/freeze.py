"""Freeze one model on this machine. READ THIS FIRST.

    prepare              models        the model in its initial state, its inputs and their sets
    build_all            candidates    for each recipe: capture the graph, lower it to payloads
    open_session, judge  judging       drift against float64, latency against eager, verdict
    with_other_payloads  payload_sets  payloads for further thread counts and for slow sizes
    assemble             packaging     payloads, golden files, evidence and manifest in one folder

`pipeline/run.py` takes the same steps for a whole catalog, on many machines.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from freezer.errors import SpecError, UsageError, expected_names
from freezer.files import scratch_folder
from freezer.freezing.candidates import (
    build_all,
    check_out,
    clear_out,
    drop_builds,
    keep_builds,
    kept_builds,
)
from freezer.freezing.freeze_options import DEFAULTS, FreezeOptions, FreezeResult
from freezer.freezing.judging import Session, judge, open_session
from freezer.freezing.models import (
    Dims,
    ExampleInputs,
    Subject,
    SubjectOptions,
    check_mode,
    example_spec,
    generators_kept,
    inferred_inputs,
    load_source,
    own_spec,
    prepare,
    to_device,
)
from freezer.freezing.packaging import clear_evidence, evidence_of, write_refused
from freezer.freezing.payload_sets import with_other_payloads
from freezer.freezing.sources import Source
from freezer.freezing.target import Target, class_here, resolve_device, target_here
from freezer.freezing.write_judged import write_judged
from freezer.hardware import PORTABLE, counts_within, thread_budget
from freezer.progress import reported
from freezer.runtime.tensor_files import read_samples
from freezer.spec import InputSpec, Objective, declared_spec
from freezer.timing import brief_waits

logger = logging.getLogger("coldpress")

__all__ = [
    "FreezeOptions",
    "FreezeResult",
    "freeze",
    "freeze_source",
    "freeze_subject",
    "freeze_target",
    "load_subject",
]


def freeze(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    out: str | Path,
    dims: Dims | None = None,
    samples: Sequence[ExampleInputs] = (),
    options: FreezeOptions = DEFAULTS,
) -> FreezeResult:
    """Freeze a model for this machine and write its artifact folder.

    Args:
        model: an `nn.Module` in eval mode. It is copied, never changed.
        example_inputs: inputs by parameter name, or positional: a tensor or a sequence. A value may
            be a tuple, list or dict of values. Constants (None, numbers, strings) are baked in.
        out: the folder to write; new or empty, or with an artifact whose speed was not measured.
            `OUT.evidence` beside it gets measurements, code and errors of what is not in it;
            `OUT.builds` the builds after `unstable`, which the next freeze into `out` uses.
        dims: the dims that may vary, by input and axis: `{"x": {0: Dim(name="batch", min=1,
            max=16)}}`. A tensor within another value is named by its path, `state.0`.
        samples: further real inputs of the same form; with any, no inputs are generated.
        options: see `FreezeOptions`.

    Raises:
        UsageError: `out`, the device class, the device, a recipe or the objective is invalid.
        SpecError: an input, a dim, a name to preserve or a budget is invalid.
        JudgeError: the eager model does not run.
    """
    check_out(Path(out), "out")
    check_mode(model)
    spec, example = example_spec(example_inputs, dims or {})
    inputs = example.values()
    device_class, device = resolve_device(model, options.device_class, options.device, inputs)
    sets = [example, *(example_spec(sample, {})[1] for sample in samples)]
    for_subject = options.for_subject(device, fill_up=not samples)
    with generators_kept():
        subject = prepare(options.name, model, spec, sets, for_subject)
    source = f"{type(model).__module__}.{type(model).__qualname__}"
    target = freeze_target(subject, device_class, device, options)
    return freeze_subject(subject, target, out=Path(out), source=source, options=options)


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
    check_out(out, "out")
    device_class, device = resolve_device(None, options.device_class, options.device)
    if source.kind == "transformers":  # before its weights are loaded
        declared = inferred_inputs(source, spec, samples)
        if declared is not None:
            logger.info("inferred from the model's class and config:")
            for name, value in declared.items():
                logger.info("%s: %s", name, json.dumps(value))
            spec = declared_spec(**declared)
    subject = load_subject(source, options.name, spec, samples, options.for_subject(device))
    target = freeze_target(subject, device_class, device, options)
    return freeze_subject(
        subject,
        target,
        out=out,
        source=str(source),
        options=options,
    )


def load_subject(
    source: Source,
    name: str,
    spec: InputSpec | None,
    samples: Path | None,
    options: SubjectOptions,
) -> Subject:
    """Load the model that a source names, with its input spec and input sets.

    Args:
        source: see `sources.parse_source`.
        name: model name.
        spec: the input spec; None to use the source's own, or the shapes of the samples.
        samples: a file of real input sets.
        options: how to prepare it.

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


def freeze_subject(
    subject: Subject,
    target: Target,
    *,
    out: Path,
    source: str,
    options: FreezeOptions,
) -> FreezeResult:
    """Freeze for a target. If nothing is faster than eager on a CPU, write the portable artifact,
    which serves instead. If the timing was disturbed, keep the builds: another freeze into the same
    folder repeats only the judge.
    """
    clear_evidence(out, (target.device_class.name, PORTABLE))
    subject = to_device(subject, target.device)
    with generators_kept(), reported(options.progress), brief_waits():
        result = _freeze_for(subject, target, out, source, options)
        if result.verdict != "unstable":
            drop_builds(out)
        lacks = result.verdict in ("kept-eager", "unstable") and result.artifact is None
        if not lacks or target.device_class.kind == "cuda":
            return result
        portable_target = target_here(PORTABLE, target.thread_counts)
        portable = _freeze_for(subject, portable_target, out, source, options)
    serves = "the portable program serves"
    if portable.artifact is None:
        serves = f"no portable program: {portable.reason}"
    return replace(
        result,
        reason=f"{result.reason}; {serves}",
        artifact=portable.artifact,
        failures={**result.failures, **portable.failures},
    )


def _freeze_for(
    subject: Subject, target: Target, out: Path, source: str, options: FreezeOptions
) -> FreezeResult:
    """Build every recipe for one target, judge the candidates, and write the winner."""
    with scratch_folder() as work:
        kept = kept_builds(out, subject, target)
        builds = build_all(subject, target, options.recipes, work, kept, options.precision)
        failures = builds.failures
        reason = "; ".join(f"{recipe}: {failure}" for recipe, failure in failures.items())
        result = FreezeResult(verdict="failed", reason=reason, failures=failures)
        try:
            if builds.candidates or not builds.errors:
                session = _session(subject, target, options, work)
                judgement = judge(session, builds.candidates)
                judgement = with_other_payloads(session, judgement, work)
                clear_out(out)
                artifact, note = write_judged(
                    session,
                    judgement,
                    dest=out,
                    provenance={"source": source},
                    failures=failures,
                )
                result = FreezeResult(
                    verdict=judgement.verdict,
                    reason=judgement.reason + note,
                    artifact=artifact,
                    judgement=judgement,
                    failures=failures,
                )
        finally:
            evidence = write_refused(
                result.judgement, builds, evidence_of(out), target.device_class.name
            )
        if result.verdict == "unstable":
            keep_builds(out, subject, target, builds.folders.values())
            again = f"; to repeat only the timing, freeze the same model into {out} again"
            result = replace(result, reason=result.reason + again)
    return replace(result, evidence=evidence)


def _session(subject: Subject, target: Target, options: FreezeOptions, work: Path) -> Session:
    session = open_session(
        subject,
        target,
        limits=options.limits,
        policy=options.policy,
        objective=options.objective,
        task_metric=options.task_metric,
    )
    return replace(session, serves_unmeasured=True, work=work)


def freeze_target(
    subject: Subject,
    device_class: str,
    device: torch.device,
    options: FreezeOptions,
) -> Target:
    """The target of a freeze, by default with this machine's class for the dtypes of the model, and
    its thread counts.
    """
    if options.objective not in get_args(Objective):
        expected = expected_names(options.objective, get_args(Objective))
        raise UsageError(f"objective: the name is unknown; {expected}")
    if device_class == "auto":
        device_class = class_here(subject.dtypes, options.precision)
    counts = options.num_threads
    if counts is None:
        counts = counts_within(thread_budget(torch.get_num_threads()))
    return target_here(device_class, counts, device if device.type == "cuda" else None)
