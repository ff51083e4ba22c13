"""The jobs of benchmarks/cliffs.py: build an artifact, and time one of its payloads or the one that
`freezer.load` chooses.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freezer.freezing.models import load_source
from freezer.freezing.sources import Source
from freezer.spec import Dim, InputSpec, Limits, SamplingPolicy, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

BATCH_MAX = 16
NUM_INPUTS = 4
INPUT = "pixel_values"
POLICY = SamplingPolicy(time_limit_s=2.5, warmup_s=1.0, percentiles=("p50",), min_rounds=3)

BUILDING = SamplingPolicy(
    time_limit_s=0.2,
    warmup_s=0.1,
    percentiles=("p50",),
    min_rounds=1,
    busy_limit=1e9,
    steal_limit=1e9,
)
"""For the judgement that an artifact needs; its times are not used."""

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
    """Build payloads, write an artifact with all of them, and write inputs at batch 1 with the
    answers of the model in float64.
    """
    import safetensors.torch
    import torch

    from freezer.freezing.candidates import build, build_further
    from freezer.freezing.judging import judge, open_session
    from freezer.freezing.models import call_source, prepare
    from freezer.freezing.packaging import assemble
    from freezer.freezing.recipes import RECIPES
    from freezer.freezing.target import target_here
    from freezer.runtime.input_sets import generate_at
    from freezer.runtime.tensors import leaves_of

    folder, spec = Path(job["folder"]), spec_of(dynamic=job["dynamic"])
    subject = prepare(job["model"], load_model(job["model"]), spec)
    target = target_here(job["device_class"], job["counts"])
    first = folder / "first" if target.further_threads else folder
    first.mkdir(exist_ok=True)
    candidate = build(subject, RECIPES["inductor-frozen"], target, first)
    candidate = (
        build_further(subject, candidate, target, folder) if target.further_threads else candidate
    )
    reference = subject.fresh().double()
    inputs = {
        str(i): generate_at(spec, spec.first_point(), seed=i).tensors[INPUT]
        for i in range(NUM_INPUTS)
    }
    answers = {
        key: leaves_of(call_source(reference, spec, {INPUT: given.double()}))[0]
        for key, given in inputs.items()
    }
    safetensors.torch.save_file(inputs, folder / "inputs.safetensors")
    safetensors.torch.save_file(
        {key: answer.to(torch.float64).contiguous() for key, answer in answers.items()},
        folder / "answers.safetensors",
    )
    small = {
        item.point.get("batch", 1): item
        for item in reversed(subject.sets)
        if item.point.get("batch", 1) < BATCH_MAX
    }
    subject = replace(subject, sets=tuple(small.values()))  # whole batches in float64 take a minute
    session = open_session(subject, target, limits=Limits(speedup_min=0.0), policy=BUILDING)
    judgement = judge(session, [candidate])
    assert judgement.winner is not None, judgement.reason
    # Keep the payloads that gain nothing as well, so that the loader has to choose.
    everything = replace(
        judgement, winner=replace(judgement.winner, candidate=candidate, dropped=())
    )
    provenance = {"source": str(SOURCES[job["model"]])}
    assemble(session, everything, dest=folder / "artifact", provenance=provenance, failures={})
    return {}


def do_measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the outputs of a payload with the answers, and time it; without `payload`, the loader
    chooses one from the store.
    """
    import safetensors.torch
    import torch

    from freezer.timing import sample

    folder = Path(job["folder"])
    torch.set_num_threads(job["num_threads"])
    run, taken = _payload(job, folder) if job["payload"] else _served(job)
    inputs = safetensors.torch.load_file(folder / "inputs.safetensors")
    answers = safetensors.torch.load_file(folder / "answers.safetensors")
    with torch.no_grad():
        max_abs_err = max(
            float((run(given).double() - answers[key]).abs().max()) for key, given in inputs.items()
        )
        sampling = sample({"payload": [partial(run, given) for given in inputs.values()]}, POLICY)
    median_ms = statistics.median(sampling.pooled("payload")) if sampling.stable else None
    return {"median_ms": median_ms, "max_abs_err": max_abs_err, "taken": taken}


def _payload(job: Mapping[str, Any], folder: Path) -> tuple[Callable[[Tensor], Tensor], None]:
    from freezer.artifact import payloads_for_threads
    from freezer.freezing.candidates import Candidate
    from freezer.runtime.loaders import LOADERS

    num_threads, shape = job["payload"]
    candidate = Candidate.read(folder)
    payload = payloads_for_threads(candidate.payloads, num_threads)[0 if shape == "static" else -1]
    run = LOADERS[payload.kind](folder / payload.path, candidate.settings)
    return lambda x: run(x)[0], None


def _served(job: Mapping[str, Any]) -> tuple[Callable[[Tensor], Tensor], str]:
    import freezer
    from freezer.runtime.tensors import leaves_of

    model = freezer.load(job["build"]["model"], store=job["store"])
    assert model.manifest is not None
    payload = model.payload_for({dim.name: 1 for dim in model.inputs.dims})
    return lambda x: leaves_of(model(x))[
        0
    ], f"{model.manifest.device_class} {Path(payload.path).name}"


def load_model(name: str) -> nn.Module:
    """The model with random weights that keep the scale of the activations.

    With transformers' initialization of MobileNetV2 they fade to 1e-21, where any output looks
    right.
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
    return InputSpec(
        inputs=(TensorSpec(name=INPUT, dtype="float32", shape=(size, 3, 224, 224)),), dims=dims
    )


JOBS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "build": do_build,
    "measure": do_measure,
}
