"""What the children of benchmarks.cliffs do: build an artifact, time one of its payloads raw, or time what `freezer.load` takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freezer.freezing.models.loaders import load_source
from freezer.freezing.models.sources import Source
from freezer.limits import Limits, SamplingPolicy
from freezer.spec.inputs import Dim, InputSpec
from freezer.spec.items import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

BATCH_MAX = 16
NUM_INPUTS = 4
INPUT = "pixel_values"
POLICY = SamplingPolicy(time_limit_s=2.5, warmup_s=1.0, percentiles=("p50",), min_rounds=3)

BUILDING = SamplingPolicy(time_limit_s=0.2, warmup_s=0.1, percentiles=("p50",), min_rounds=1, busy_limit=1e9, steal_limit=1e9)
"""An artifact needs a judgement, whose times count for nothing here."""

SOURCES: Mapping[str, Source] = {
    "resnet18": Source(
        kind="transformers",
        location="ResNetForImageClassification",
        weights="random",
        args={
            "layer_type": "basic",
            "embedding_size": 64,
            "hidden_sizes": [64, 128, 256, 512],
            "depths": [2, 2, 2, 2],
            "num_labels": 1000,
        },
    ),
    "mobilenet-v2": Source(
        kind="transformers",
        location="MobileNetV2ForImageClassification",
        weights="random",
        args={"tf_padding": False, "num_labels": 1000},
    ),
}


def do_build(job: Mapping[str, Any]) -> dict[str, Any]:
    """Build payloads; write inputs at batch 1 with the float64 model's answers beside them, and an artifact that holds them all."""
    import safetensors.torch
    import torch

    from freezer.freezing.candidates.build import build
    from freezer.freezing.models.calls import call_source
    from freezer.freezing.models.subject import prepare
    from freezer.freezing.models.weights import weights_digest
    from freezer.freezing.packaging.assemble import assemble
    from freezer.freezing.recipes.recipes import RECIPES
    from freezer.freezing.target.target import target_here
    from freezer.freezing.validation.judge import judge
    from freezer.runtime.pytree import leaves_of
    from freezer.runtime.sample_generation import generate_at

    folder, spec = Path(job["folder"]), spec_of(dynamic=job["dynamic"])
    subject = prepare(job["model"], load_model(job["model"]), spec)
    target = target_here(job["device_class"], job["counts"])
    candidate = build(subject, RECIPES["inductor-frozen"], target, folder)
    reference = subject.fresh().double()
    inputs = {str(i): generate_at(spec, spec.first_point(), seed=i).tensors[INPUT] for i in range(NUM_INPUTS)}
    answers = {key: leaves_of(call_source(reference, spec, {INPUT: given.double()}))[0] for key, given in inputs.items()}
    safetensors.torch.save_file(inputs, folder / "inputs.safetensors")
    safetensors.torch.save_file(
        {key: answer.to(torch.float64).contiguous() for key, answer in answers.items()}, folder / "answers.safetensors"
    )
    small = {item.point.get("batch", 1): item for item in reversed(subject.sets) if item.point.get("batch", 1) < BATCH_MAX}
    subject = replace(subject, sets=tuple(small.values()))  # whole batches in float64 take a minute, and show nothing more here
    judgement = judge(subject, [candidate], target, limits=Limits(speedup_min=0.0), policy=BUILDING)
    assert judgement.winner is not None, judgement.reason
    # Whatever gains nothing is left out of an artifact; here all of it is wanted, so that the loader has to choose.
    everything = replace(judgement, winner=replace(judgement.winner, candidate=candidate, dropped=()))
    provenance = {"source": str(SOURCES[job["model"]]), "weights": weights_digest(subject.model)}
    assemble(subject, everything, target, dest=folder / "artifact", provenance=provenance, failures={})
    return {}


def do_measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Open a payload as it is, hold its outputs against the answers, and time it."""
    import torch

    from freezer.artifact.payload_selection import set_for
    from freezer.freezing.candidates.candidate import Candidate
    from freezer.runtime.payloads import LOADERS

    folder = Path(job["folder"])
    torch.set_num_threads(job["num_threads"])
    candidate = Candidate.read(folder)
    payload = set_for(candidate.payloads, job["built_with"])[0 if job["shape"] == "static" else -1]
    run = LOADERS[payload.kind](folder / payload.path, candidate.settings)
    return _timed(folder, lambda x: run(x)[0])


def do_serve(job: Mapping[str, Any]) -> dict[str, Any]:
    """Let the loader choose from a store for a process with so many threads, and time what it took."""
    import torch

    import freezer
    from freezer.runtime.pytree import leaves_of

    torch.set_num_threads(job["num_threads"])
    model = freezer.load(job["model"], store=job["store"])
    assert model.manifest is not None  # whatever load gives has one
    payload = model.payload_for({dim.name: 1 for dim in model.inputs.dims})
    found = _timed(Path(job["folder"]), lambda x: leaves_of(model(x))[0])
    return {**found, "taken": f"{model.manifest.device_class} {Path(payload.path).name}"}


def _timed(folder: Path, run: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    import safetensors.torch
    import torch

    from freezer.timing.sampling import sample

    inputs = safetensors.torch.load_file(folder / "inputs.safetensors")
    answers = safetensors.torch.load_file(folder / "answers.safetensors")
    with torch.no_grad():
        max_abs_err = max(float((run(given).double() - answers[key]).abs().max()) for key, given in inputs.items())
        sampling = sample({"payload": [partial(run, given) for given in inputs.values()]}, POLICY)
    return {
        "median_ms": statistics.median(sampling.pooled("payload")) if sampling.stable else None,
        "max_abs_err": max_abs_err,
    }


def load_model(name: str) -> nn.Module:
    """The model with random weights whose activations keep their scale through the layers.

    transformers' own initialization of MobileNetV2 lets them fade to 1e-21, where any output looks right.
    """
    import torch

    model = load_source(SOURCES[name])
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight)
    return model


def spec_of(*, dynamic: bool) -> InputSpec:
    """Images of 224 pixels: one, or with `dynamic` up to BATCH_MAX of them."""
    size = "batch" if dynamic else 1
    dims = (Dim(name="batch", min=1, max=BATCH_MAX),) if dynamic else ()
    return InputSpec(inputs=(TensorSpec(name=INPUT, dtype="float32", shape=(size, 3, 224, 224)),), dims=dims)


JOBS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"build": do_build, "measure": do_measure, "serve": do_serve}


def threads_text(num: int) -> str:
    """A thread count in words."""
    return "1 thread" if num == 1 else f"{num} threads"


def best_of(medians_ms: Sequence[Sequence[float]]) -> float | None:
    """The least of some cells' middle medians; None where all were disturbed."""
    return min((statistics.median(found) for found in medians_ms if found), default=None)
