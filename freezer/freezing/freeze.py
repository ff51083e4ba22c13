"""Freeze one model on this machine: capture -> lower -> validate -> package. READ THIS FIRST.

    subject      the model in its initial state, its input spec, and its input sets                      models/subject.py
    candidates   one for each recipe: the graph is captured and lowered to payloads                      candidates/build.py
    judgement    drift against float64, latency against eager, measured side by side; the verdict        validation/judge.py
    artifact     payloads, golden inputs and outputs, evidence and the manifest, in one folder           packaging/assemble.py

`pipeline/run.py` takes the same steps for a whole catalog, on many machines.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from freezer.artifact.folder import Artifact
from freezer.errors import FreezeError, SpecError
from freezer.files.paths import check_folder
from freezer.freezing.candidates.build import build
from freezer.freezing.candidates.candidate import Candidate
from freezer.freezing.models.checks import check_mode
from freezer.freezing.models.loaders import load_source, own_spec
from freezer.freezing.models.randomness import generators_kept
from freezer.freezing.models.samples import spec_of_samples, tensor_spec
from freezer.freezing.models.sources import Source
from freezer.freezing.models.subject import Subject, SubjectOptions, placed, prepare
from freezer.freezing.models.weights import let_go, weights_digest
from freezer.freezing.packaging.assemble import assemble
from freezer.freezing.packaging.eager_fallback import keep_eager, serves_itself
from freezer.freezing.recipes.recipes import select
from freezer.freezing.target.target import Target, aim, class_here, target_here
from freezer.freezing.validation.judge import Judgement, TaskMetric, judge
from freezer.hardware.cgroups import thread_budget
from freezer.hardware.device_classes import PORTABLE
from freezer.limits import Limits, SamplingPolicy
from freezer.runtime.devices import CPU
from freezer.runtime.tensor_files import read_samples
from freezer.runtime.tensor_memory import dtypes_of, program_tensors
from freezer.spec.inputs import Dim, InputSpec
from freezer.spec.items import ConstantSpec, InputItem, NestedSpec

ExampleInputs = Mapping[str, Any] | Sequence[Any] | Tensor


@dataclass(frozen=True, kw_only=True)
class FreezeResult:
    """What became of one model on this machine.

    Attributes:
        verdict: as docs/contract.md says: published, kept-eager, rejected, failed, unstable.
        reason: one sentence for people.
        artifact: the folder that was written: the frozen one, or with kept-eager the portable one; None when there is none.
        judgement: of the device class; None when no candidate was built.
        failures: for each recipe that made no candidate, why.
        tracebacks: of those failures, in full.
    """

    verdict: str
    reason: str
    artifact: Artifact | None
    judgement: Judgement | None
    failures: Mapping[str, str]
    tracebacks: Mapping[str, str] = field(default_factory=dict)


def freeze(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    out: str | Path,
    name: str = "model",
    dims: Mapping[str, Mapping[int, Dim]] | None = None,
    recipes: Iterable[str] = ("auto",),
    device_class: str = "auto",
    num_threads: int | Sequence[int] | None = None,
    points: Sequence[Mapping[str, int]] | None = None,
    limits: Limits | None = None,
    policy: SamplingPolicy | None = None,
    task_metric: TaskMetric | None = None,
    preserve: Sequence[str] = (),
    reset: str | None = None,
    device: str | None = None,
) -> FreezeResult:
    """Freeze a model for this machine and write its artifact folder.

    Args:
        model: in eval mode. It is copied; its weights, mode and buffers are the same afterwards.
        example_inputs: by parameter name, or positional: a tensor or a sequence. A value may be a tuple, list or dict of values.
            Constants (None, numbers, strings) are baked in.
        out: the folder to write; it must not exist, or be empty.
        name: of the model in the manifest.
        dims: by input and axis, the dims that may vary: `{"x": {0: Dim(name="batch", min=1, max=16)}}`; tensors within others are
            named by their path, `state.0`.
        recipes: names of RECIPES; `auto` for those that are worth a try on any model, `all` for every one.
        device_class: whose limits this process holds; `auto` is the class of the GPU that the model lies on, else the machine's own
            CPU class.
        num_threads: to build, judge and serve with; by default torch's own count, but no more than the process has CPUs. The
            verdict is taken at the first of several, and payloads for the others are kept where they gain.
        points: sizes by dim name, `[{"batch": 1}, {"batch": 8}]`, for each of which a payload is tried beside the one for all. A
            dim that a point leaves out takes its least size. The verdict is taken at the first, which by default has all at their
            least.
        limits, policy, task_metric: see `judge`.
        preserve: attributes, methods and attributes of submodules (`sub.attr`) that the frozen model still has.
        reset: the method, without arguments, that clears the model's state; judging calls it between input sets.
        device: to freeze on: `cuda:1`; by default, of a CUDA class, the GPU that the model lies on where it is of the class, else
            the current one. With `auto` the class is the device's own.

    Raises:
        UsageError: `out`, the device class, a recipe or an input is not as it must be.
        JudgeError: the eager model does not run.
    """
    check_folder(Path(out), "out")
    check_mode(model)
    spec, example = example_spec(example_inputs, dims or {})
    device_class, where = aim(model, device_class, device, example.values())
    with generators_kept():
        options = SubjectOptions(preserve=preserve, reset=reset, points=points or (), fill_up=True, device=where)
        subject = prepare(name, model, spec, [example], options)
    return freeze_subject(
        subject,
        out=Path(out),
        recipes=recipes,
        device_class=device_class,
        num_threads=num_threads if num_threads is not None else thread_budget(torch.get_num_threads()),
        limits=limits or Limits(),
        policy=policy or SamplingPolicy(),
        task_metric=task_metric,
        provenance={"source": f"{type(model).__module__}.{type(model).__qualname__}"},
        device=where,
    )


def freeze_source(
    source: Source,
    *,
    spec: InputSpec | None,
    samples: Path | None,
    out: Path,
    name: str,
    device_class: str,
    num_threads: int | Sequence[int] | None,
    recipes: Iterable[str],
    preserve: Sequence[str] = (),
    reset: str | None = None,
    points: Sequence[Mapping[str, int]] | None = None,
    device: str | None = None,
) -> FreezeResult:
    """Freeze what a source names; the command `coldpress freeze`.

    Args:
        source: of sources.parse_source.
        spec: of its inputs; None takes the samples' own shapes.
        samples: a file of real input sets.
        out, name, device_class, num_threads, recipes, preserve, reset, points, device: as of `freeze`; a source is loaded onto the
            CPU, so that `auto` is the machine's CPU class unless a device is named.

    Raises:
        SourceError: the model cannot be loaded.
        UsageError, JudgeError: as of `freeze`.
    """
    check_folder(out, "out")
    device_class, where = aim(None, device_class, device)
    kept: dict[str, Any] = {"preserve": preserve, "reset": reset, "points": points or (), "device": where}
    subject = load_subject(source, name=name, spec=spec, samples=samples, **kept)
    return freeze_subject(
        subject,
        out=out,
        recipes=recipes,
        device_class=device_class,
        num_threads=num_threads if num_threads is not None else thread_budget(torch.get_num_threads()),
        limits=Limits(),
        policy=SamplingPolicy(),
        task_metric=None,
        provenance={"source": str(source)},
        device=where,
    )


def load_subject(
    source: Source,
    *,
    name: str,
    spec: InputSpec | None,
    samples: Path | None,
    fill_up: bool = False,
    preserve: Sequence[str] = (),
    reset: str | None = None,
    points: Sequence[Mapping[str, int]] = (),
    device: torch.device = CPU,
) -> Subject:
    """The subject that a source names: its model, spec and input sets.

    Args:
        source: of sources.parse_source.
        name: of the entry.
        spec: of its inputs; None takes what the source itself tells, or the samples' own shapes.
        samples: a file of real input sets.
        fill_up: add generated sets to the samples.
        preserve, reset, points: as of `freeze`.
        device: as of `prepare`.

    Raises:
        SourceError, SpecError, JudgeError: the model, its samples or its inputs are not as they must be.
    """
    model = load_source(source)
    sets = read_samples(samples) if samples else []
    spec = spec or own_spec(model) or (InputSpec(inputs=spec_of_samples(sets[0])) if sets else None)
    if spec is None:
        raise SpecError(
            f"source {source} does not tell its inputs; declare them (`inputs:`; with `coldpress freeze`, `--inputs`), or give "
            "samples"
        )
    options = SubjectOptions(preserve=preserve, reset=reset, points=points, fill_up=fill_up, device=device)
    return prepare(name, model, spec, sets, options)


def freeze_subject(
    subject: Subject,
    *,
    out: Path,
    recipes: Iterable[str],
    device_class: str,
    num_threads: int | Sequence[int],
    limits: Limits,
    policy: SamplingPolicy,
    task_metric: TaskMetric | None,
    provenance: Mapping[str, Any],
    device: torch.device = CPU,
) -> FreezeResult:
    """Freeze a prepared subject; `freeze` and the command both end here. `device` is the GPU of a CUDA class."""
    wanted = class_here(dtypes_of(program_tensors(subject.model))) if device_class == "auto" else device_class
    target = target_here(wanted, num_threads, device if device.type == "cuda" else None)
    provenance = {**provenance, "weights": weights_digest(subject.model)}
    with tempfile.TemporaryDirectory(prefix="coldpress-") as work, generators_kept():
        subject = placed(subject, target.device)
        result = _freeze_for(subject, target, recipes, Path(work), out, limits, policy, task_metric, provenance)
        if result.verdict != "kept-eager":
            return result
        if serves_itself(target):
            settings: dict[str, Any] = {"limits": limits, "policy": policy, "provenance": provenance, "failures": result.failures}
            artifact, why = keep_eager(subject, target, work=Path(work), out=out, **settings)
            return replace(result, reason=f"{result.reason}; {why}", artifact=artifact)
        portable = target_here(PORTABLE, num_threads)
        served = _freeze_for(subject, portable, recipes, Path(work), out, limits, policy, task_metric, provenance)
        return FreezeResult(
            verdict="kept-eager",
            reason=f"{result.reason}; "
            + ("the portable program serves" if served.artifact else f"no portable program: {served.reason}"),
            artifact=served.artifact,
            judgement=result.judgement,
            failures={**result.failures, **served.failures},
            tracebacks={**result.tracebacks, **served.tracebacks},
        )


def _freeze_for(
    subject: Subject,
    target: Target,
    recipes: Iterable[str],
    work: Path,
    out: Path,
    limits: Limits,
    policy: SamplingPolicy,
    task_metric: TaskMetric | None,
    provenance: Mapping[str, Any],
) -> FreezeResult:
    """Build every recipe for one target, judge the candidates, and write the winner."""
    candidates, errors = _build_all(subject, target, recipes, work)
    failures = {recipe: str(error) for recipe, error in errors.items()}
    tracebacks = {recipe: "".join(traceback.format_exception(error)) for recipe, error in errors.items()}
    found = partial(FreezeResult, failures=failures, tracebacks=tracebacks)
    if not candidates and not failures:
        return found(verdict="kept-eager", reason="no other recipe than eager was asked for", artifact=None, judgement=None)
    if not candidates:
        reason = "; ".join(f"{recipe}: {why}" for recipe, why in failures.items())
        return found(verdict="failed", reason=reason, artifact=None, judgement=None)
    judgement = judge(subject, candidates, target, limits=limits, policy=policy, task_metric=task_metric)
    artifact = None
    if judgement.winner is not None:
        settings: dict[str, Any] = {"limits": limits, "policy": policy, "provenance": provenance, "failures": failures}
        artifact = assemble(subject, judgement, target, dest=out, **settings)
    return found(verdict=judgement.verdict, reason=judgement.reason, artifact=artifact, judgement=judgement)


def _build_all(
    subject: Subject, target: Target, recipes: Iterable[str], work: Path
) -> tuple[list[Candidate], dict[str, FreezeError]]:
    """The candidates, and for each recipe that made none the error."""
    candidates: list[Candidate] = []
    errors: dict[str, FreezeError] = {}
    handled = sys.exception()
    for recipe in select(recipes, portable=target.device_class.name == PORTABLE):
        folder = work / f"{target.device_class.name}-{recipe.name}"
        folder.mkdir()
        try:
            candidates.append(build(subject, recipe, target, folder))
        except FreezeError as error:
            let_go(error, handled)
            errors[recipe.name] = error
    return candidates, errors


def example_spec(example_inputs: ExampleInputs, dims: Mapping[str, Mapping[int, Dim]]) -> tuple[InputSpec, dict[str, Tensor]]:
    """The input spec and the one sample set that example inputs stand for.

    Args:
        example_inputs: as of `freeze`.
        dims: as of `freeze`, by the tensors' paths.

    Raises:
        SpecError: a value is no tensor, no plain constant and no tuple, list or dict of such, or a dim names no input or axis.
    """
    keyword = isinstance(example_inputs, Mapping)
    if isinstance(example_inputs, Mapping):
        values = dict(example_inputs)
    else:
        given = [example_inputs] if isinstance(example_inputs, Tensor) else list(example_inputs)
        values = {f"input_{index}": value for index, value in enumerate(given)}
    example: dict[str, Tensor] = {}
    items = tuple(_example_item(path, value, dims, example) for path, value in values.items())
    for path in dims:
        if path not in example:
            raise SpecError(f"dims name {path!r}, which is no tensor input; those are {', '.join(example)}")
    used: dict[str, Dim] = {}
    for dim in (dim for path in example for dim in dims.get(path, {}).values()):
        if used.setdefault(dim.name, dim) != dim:
            raise SpecError(f"dim {dim.name!r} is given with two bounds; expected one for all inputs")
    return InputSpec(inputs=items, dims=tuple(used.values()), style="keyword" if keyword else "positional"), example


def _example_item(path: str, value: Any, dims: Mapping[str, Mapping[int, Dim]], example: dict[str, Tensor]) -> InputItem:
    """The item that an example value stands for; its tensors go into `example`, by path."""
    if isinstance(value, Tensor):
        axes = dims.get(path, {})
        for axis in axes:
            if not 0 <= axis < value.dim():
                raise SpecError(f"dims: input {path!r} has no axis {axis}; its axes are 0 to {value.dim() - 1}")
        example[path] = value
        declared = tensor_spec(path, value)
        return replace(declared, shape=tuple(axes[axis].name if axis in axes else size for axis, size in enumerate(declared.shape)))
    if value is None or isinstance(value, bool | int | float | str):
        return ConstantSpec(name=path, value=value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        parts = tuple(_example_item(f"{path}.{key}", part, dims, example) for key, part in value.items())
        return NestedSpec(name=path, kind="dict", items=parts, keys=tuple(value))
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        parts = tuple(_example_item(f"{path}.{index}", part, dims, example) for index, part in enumerate(value))
        return NestedSpec(name=path, kind="tuple" if isinstance(value, tuple) else "list", items=parts)
    raise SpecError(
        f"input {path!r}: got a {type(value).__name__}, expected a tensor, a plain constant, or a tuple, list or dict of such, "
        "with texts as keys"
    )
