"""The steps of a freeze with quick settings, and artifacts without a model."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from freezer.artifact import (
    GOLDEN_INPUTS,
    GOLDEN_OUTPUTS,
    MEDIA_SAFETENSORS,
    Artifact,
    DriftRecord,
    FreezingRecord,
    FreezingReport,
    GateRecord,
    GoldenSet,
    Manifest,
    Needs,
    Payload,
    PayloadKind,
    RecipeRecord,
    file_ref,
)
from freezer.files import digest_file
from freezer.freezing.candidates import Candidate, build
from freezer.freezing.capture import Attempt, Captured
from freezer.freezing.freeze import FreezeOptions, FreezeResult, freeze
from freezer.freezing.judging import Judgement, Session, judge, open_session
from freezer.freezing.models import Dims, Subject, SubjectOptions, example_spec, prepare
from freezer.freezing.recipes import RECIPES, CaptureName
from freezer.freezing.target import Target, class_here, target_here
from freezer.hardware import auto_classes, detect
from freezer.runtime.contract import OpenPayload
from freezer.runtime.frozen_model import CallOptions, FrozenModel
from freezer.runtime.tensor_files import load_tensors, save_tensors
from freezer.runtime.tensors import dtypes_of, flatten, output_specs, program_tensors
from freezer.spec import (
    Dim,
    InputSpec,
    Limits,
    OutputSpec,
    OutputStructure,
    SamplingPolicy,
    TensorSpec,
)
from tests.support.commands import finished

QUICK = SamplingPolicy(
    time_limit_s=0.3, warmup_s=0.1, min_rounds=1, busy_limit=2.0, steal_limit=2.0
)
"""Samples quickly, and accepts a busy machine."""

ANY_SPEED = Limits(speedup_min=0.0)
"""Publish everything that passes the drift gate."""

BATCH = Dim(name="batch", min=1, max=4)

HERE = next(name for name in auto_classes(detect().classes) if not name.startswith("cuda"))
"""The device class of this machine's CPU."""

QUICK_OPTIONS = FreezeOptions(
    device_class=HERE, limits=ANY_SPEED, policy=QUICK, num_threads=torch.get_num_threads()
)
"""One thread count; further ones take another build."""


def quickly(
    model: nn.Module,
    inputs: Any,
    out: Path,
    recipe: str = "torchscript-frozen",
    *,
    dims: Dims | None = None,
    samples: Sequence[Any] = (),
    **options: Any,
) -> FreezeResult:
    """Freeze by one recipe with QUICK_OPTIONS and some others."""
    changed = replace(QUICK_OPTIONS, recipes=[recipe], **options)
    return freeze(model.eval(), inputs, out=out, dims=dims, samples=samples, options=changed)


def artifact_of(result: FreezeResult) -> Artifact:
    """The artifact that a freeze has made."""
    assert result.artifact is not None, (result.reason, result.failures)
    return result.artifact


def subject_of(
    model: nn.Module,
    inputs: Mapping[str, Any],
    dims: Mapping[str, Mapping[int, Dim]] | None = None,
    points: Sequence[Mapping[str, int]] = (),
) -> Subject:
    spec, example = example_spec(inputs, dims or {})
    return prepare(
        "model", model.eval(), spec, [example], SubjectOptions(fill_up=True, points=points)
    )


def captured_by(
    subject: Subject, name: CaptureName, point: Mapping[str, int] | None = None
) -> Captured:
    return Attempt(subject, point).capture(name)


def candidate_of(
    subject: Subject, recipe: str, folder: Path, target: Target | None = None
) -> Candidate:
    folder.mkdir()
    return build(
        subject,
        RECIPES[recipe],
        target or target_of(subject, recipe, torch.get_num_threads()),
        folder,
    )


def target_of(subject: Subject, recipe: str, num_threads: int) -> Target:
    """The target of a recipe on this machine; `auto` depends on the dtypes of the weights."""
    here = class_here(dtypes_of(program_tensors(subject.model)))
    return target_here("portable" if RECIPES[recipe].portable else here, num_threads)


def judgement_of(
    subject: Subject, candidates: Sequence[Candidate], limits: Limits = ANY_SPEED, **kwargs: Any
) -> Judgement:
    target = target_of(subject, candidates[0].recipe, torch.get_num_threads())
    return judge(session_of(subject, target, limits=limits, **kwargs), candidates)


def judgement_in_place(
    model: nn.Module,
    served: nn.Module,
    inputs: Mapping[str, Any],
    folder: Path,
    recipe: str = "torchscript-frozen",
    dims: Mapping[str, Mapping[int, Dim]] | None = None,
    **options: Any,
) -> Judgement:
    """Judge what was built from another model as a candidate of a model."""
    subject = subject_of(model, inputs, dims)
    other = candidate_of(subject_of(served, inputs, dims), recipe, folder / "served")
    return judgement_of(subject, [replace(other, weights=subject.weights)], **options)


def session_of(subject: Subject, target: Target, **kwargs: Any) -> Session:
    """A session that samples quickly and publishes at any speed, unless told otherwise."""
    return open_session(subject, target, **{"limits": ANY_SPEED, "policy": QUICK, **kwargs})


def rules(**changes: Any) -> Session:
    """A session without a model, for what is decided from figures alone."""
    nothing: Any = None
    plain = Session(
        subject=nothing,
        target=nothing,
        limits=Limits(),
        policy=SamplingPolicy(percentiles=("p50", "p90"), num_bootstrap=200),
        objective="p50",
        on_drift_alone=False,
        task_metric=None,
        reference=nothing,
        gate=nothing,
    )
    return replace(plain, **changes)


def plain_payload(
    kind: PayloadKind = "exported", num_threads: int | None = None, **changes: Any
) -> Payload:
    """A payload without a file."""
    plain = Payload(
        path="payloads/all.pt2",
        digest=f"sha256:{'0' * 64}",
        size_bytes=1,
        kind=kind,
        num_threads=num_threads,
    )
    return replace(plain, **changes)


def frozen_function(
    run: Callable[..., Any], spec: InputSpec, result: Any, *payloads: Payload, **options: Any
) -> FrozenModel:
    """A frozen model whose payloads are one Python function, which gives such a result."""
    structure, leaves = flatten(result)
    return FrozenModel(
        spec=spec,
        outputs=output_specs(structure, leaves),
        structure=structure,
        payloads=[OpenPayload(payload=payload, run=run) for payload in payloads],
        options=CallOptions(**options),
    )


def plain_candidate(*payloads: Payload, **changes: Any) -> Candidate:
    """A candidate without files."""
    plain = Candidate(
        folder=Path(),
        recipe="inductor-frozen",
        lowering="inductor",
        capture="export",
        settings={},
        payloads=payloads,
        reports={payload.path: FreezingReport() for payload in payloads},
        toolchain={},
    )
    return replace(plain, **changes)


def random_inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def manifest_of(payload: Payload, **changes: Any) -> Manifest:
    """A manifest with one payload and a value in every field."""
    plain = Manifest(
        model="tiny",
        device_class="portable",
        verdict="published",
        recipe=RecipeRecord(
            name="portable", capture="export", lowering="exported", settings={"freeze": False}
        ),
        inputs=InputSpec(
            inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 4)),), dims=(BATCH,)
        ),
        outputs=(OutputSpec(name="output", dtype="float32", rank=2),),
        structure=OutputStructure(kind="tensor"),
        payloads=(payload,),
        files=(),
        golden=(GoldenSet(point={"batch": 1}, native_rmse={"output": 1e-8}),),
        reference="float64",
        stateful=False,
        needs=Needs(torch="2.11"),
        toolchain={
            "torch": "2.13.0",
            "onednn": "3.7.1",
            "cxx": None,
            "cuda": None,
            "python": "3.11.2",
        },
        drift=DriftRecord(error_ratio=1.25, max_abs_err=1e-7, sqnr_db=140.0, margin=2.4),
        gate=GateRecord(error_ratio_max=3.0, speedup_min=1.05),
        latency=None,
        provenance={"source": "python:tests.support.models:mlp", "weights": f"sha256:{'0' * 64}"},
        freezing=FreezingRecord(build_s=1.5, warnings=("one",)),
    )
    return replace(plain, **changes)


def write_plain_artifact(folder: Path, content: bytes = b"payload", **changes: Any) -> Artifact:
    """An artifact folder whose payload is just bytes: a store never opens one."""
    for name in ("payloads", "golden"):
        (folder / name).mkdir(parents=True)
    path = folder / "payloads" / "all.pt2"
    path.write_bytes(content)
    (folder / GOLDEN_INPUTS).write_bytes(b"golden")
    payload = plain_payload(digest=digest_file(path), size_bytes=len(content), dims=(BATCH,))
    files = (file_ref(folder, GOLDEN_INPUTS, MEDIA_SAFETENSORS),)
    return rewritten(Artifact(folder=folder, manifest=manifest_of(payload, files=files)), **changes)


def rewritten(artifact: Artifact, **changes: Any) -> Artifact:
    """Change some fields of an artifact's manifest in its folder."""
    manifest = replace(artifact.manifest, **changes)
    (artifact.folder / "manifest.json").write_bytes(manifest.to_bytes())
    return Artifact(folder=artifact.folder, manifest=manifest)


def copy_of(artifact: Artifact, folder: Path, **changes: Any) -> Artifact:
    """A copy of an artifact folder, with some fields of its manifest changed."""
    shutil.copytree(artifact.folder, folder, dirs_exist_ok=True)
    return rewritten(Artifact(folder=folder, manifest=artifact.manifest), **changes)


def with_golden(
    artifact: Artifact,
    folder: Path,
    change: Callable[[Tensor], Tensor],
    only: str | None = None,
) -> Artifact:
    """A copy with changed golden outputs, all or one, and matching digests."""
    copied = copy_of(artifact, folder)
    path = folder / GOLDEN_OUTPUTS
    outputs = load_tensors(path)
    for name in [only] if only else list(outputs):
        outputs[name] = change(outputs[name])
    path.unlink()
    save_tensors(outputs, path)
    files = [file_ref(folder, item.path, item.media_type) for item in copied.manifest.files]
    return rewritten(copied, files=tuple(files))


def blob_of(folder: Path, digest: str) -> Path:
    """The file of a digest in the folder of a model of a store."""
    return folder / "blobs" / "sha256" / digest.removeprefix("sha256:")


def flip_a_byte(path: Path) -> None:
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


def python(
    code: str, *args: object, env: Mapping[str, str] | None = None, timeout_s: float = 120
) -> str:
    """Run code in a new interpreter and return its output; the test fails if it fails."""
    done = finished(sys.executable, "-c", code, *args, env=env, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    return done.stdout
