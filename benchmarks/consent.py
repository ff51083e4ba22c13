"""Seed violations of budgets, and engines that stay in float32 without saying so; count what gets
through.

    python -m benchmarks.consent [--only WORDS]

A violation is published if an artifact in int8 agrees with eager on fewer new samples than the
budget allows, or if its samples are too few to be sure. A fallback is detected if the build fails
with CP-PRECISION.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import nn

import freezer
from benchmarks.pages import machine, markdown_table, results_page
from freezer.errors import BuildError
from freezer.freezing.candidates import build
from freezer.freezing.freeze import FreezeOptions, freeze
from freezer.freezing.lowering import open_vino
from freezer.freezing.models import SubjectOptions, example_spec, prepare
from freezer.freezing.recipes import OPENVINO_SETTINGS, RECIPES
from freezer.freezing.target import class_here, target_here
from freezer.runtime.held_out import HeldOut, read_held_out
from freezer.spec import Accuracy
from tests.support.classifiers import Outlier, classifier, images, write_samples
from tests.support.steps import ANY_SPEED, QUICK

OPENVINO, ONNXRUNTIME, INDUCTOR = ENGINES = ("openvino-int8", "onnxruntime-int8", "inductor-int8")

BATCH, LIMIT, NUM_SAMPLES, NUM_NEW = 8, 0.95, 640, 1000
"""Images of a sample, since Inductor's int8 takes one size; least agreement; and the numbers of
samples that judge it, and that check the judge."""

EXAMPLE = {"image": images(BATCH, 1)[0]}

OUTLIER, CALIBRATION, FEW = "a feature times {:g}", "calibration times {:g}", "{} samples"

VIOLATIONS = (
    *product(ENGINES, [OUTLIER], [1e3, 3e3, 1e4, 3e4, 1e5]),
    *product(ENGINES, [CALIBRATION], [0.003, 0.01, 0.03, 100, 300]),
    *product(ENGINES, [FEW], [16, 40, 60, 76]),  # without a difference it takes 59 judged ones
)
"""Recipe, kind and size."""

CLASS = class_here((), ("bf16", "int8"))
OPTIONS = FreezeOptions(num_threads=1, limits=ANY_SPEED, policy=QUICK, precision=["int8"])


QUANTIZED = open_vino._quantized


def with_other_levels(*given: Any) -> Any:
    """Quantize a model of OpenVINO to levels that are not those of 8 bits, which kernels lack."""
    from openvino import opset13

    made = QUANTIZED(*given)
    for op in made.get_ordered_ops():
        if op.get_type_name() == "FakeQuantize":
            levels = opset13.fake_quantize(*op.input_values(), levels=2**16)
            for reader in op.output(0).get_target_inputs():
                reader.replace_source_output(levels.output(0))
    return made


SAME: Any = lambda model, *_, **__: model  # noqa: E731
ANNOTATE = (
    "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer.X86InductorQuantizer.annotate"
)
UNFROZEN = {**RECIPES[INDUCTOR].settings["inductor"], "freezing": False}

FALLBACKS: tuple[tuple[str, str, str, Any], ...] = (
    ("openvino-bf16", "float32 hint", "openvino", OPENVINO_SETTINGS),
    (OPENVINO, "16 bits", "freezer.freezing.lowering.open_vino._quantized", with_other_levels),
    (OPENVINO, "not quantized", "freezer.freezing.lowering.open_vino._quantized", SAME),
    (ONNXRUNTIME, "not fused", "session", {"session.disable_quant_qdq": "1"}),
    (ONNXRUNTIME, "not optimized", "freezer.freezing.lowering.onnx_runtime.optimized", SAME),
    (ONNXRUNTIME, "not quantized", "freezer.freezing.lowering.onnx_runtime._quantized", SAME),
    (INDUCTOR, "not frozen", "inductor", UNFROZEN),
    (INDUCTOR, "not fused", "torch._inductor.freezing.freezing_passes", MagicMock()),
    (INDUCTOR, "not annotated", ANNOTATE, lambda _, model: model),
    (
        "inductor-bf16",
        "no autocast",
        "freezer.freezing.lowering.inductor.compilation.autocast_to",
        MagicMock(),
    ),
)
"""Recipe, what keeps it in float32, and the setting, or function of the tools, that does."""


def violation(recipe: str, kind: str, size: float, folder: Path) -> str:
    """Seed a violation; return what became of it."""

    def read(*given: Any) -> HeldOut:
        found = read_held_out(*given)
        if kind == CALIBRATION:
            for inputs in found.calibration:
                inputs.tensors["image"].mul_(size)
        return found

    model = Outlier(size).eval() if kind == OUTLIER else classifier()
    num = int(size) if kind == FEW else NUM_SAMPLES
    samples = write_samples(folder / "samples.safetensors", BATCH * num)
    budget = Accuracy(samples=samples, top1_agreement_min=LIMIT)
    options = replace(OPTIONS, recipes=[recipe], accuracy=budget)
    with patch("freezer.freezing.models.subject.read_held_out", read):
        made = freeze(model, EXAMPLE, out=folder / "out", options=options)
    if made.artifact is None or made.artifact.manifest.accuracy is None:
        return f"refused: {made.reason}"
    frozen, same = freezer.load(made.artifact.folder), 0
    for image in images(BATCH * NUM_NEW, 20_000)[0].split(BATCH):
        same += torch.equal(frozen(image=image).argmax(-1), model(image).argmax(-1))
    word = "published" if kind == FEW or same < LIMIT * NUM_NEW else "repaired"
    return f"{word}: agreement {same / NUM_NEW:.3f}"


def fallback(name: str, place: str, fault: Any, make: Callable[[], nn.Module], folder: Path) -> str:
    """Let an engine stay in float32; return what became of it."""
    spec, example = example_spec(EXAMPLE, {})
    samples = write_samples(folder / "samples.safetensors", 16 * BATCH)
    options = SubjectOptions(accuracy=Accuracy(samples=samples, cosine_min=0.1))
    seeded, recipe = prepare("seeded", make().eval(), spec, [example], options), RECIPES[name]
    with ExitStack() as stack:
        if place in recipe.settings:
            recipe = replace(recipe, settings={**recipe.settings, place: fault})
        else:
            stack.enter_context(patch(place, fault))
        try:
            build(seeded, recipe, target_here(CLASS, 1), folder)
        except BuildError as error:
            return f"failed with {error.code}"
    return "built"


def cases() -> Iterator[tuple[str, str, Callable[[Path], str]]]:
    """Recipe, what is seeded, and the function that seeds it in a folder."""
    for recipe, kind, size in VIOLATIONS:
        yield recipe, kind.format(size), partial(violation, recipe, kind, size)
    for (recipe, what, place, fault), make in product(FALLBACKS, (classifier, Outlier)):
        yield recipe, f"{what}, {make.__name__}", partial(fallback, recipe, place, fault, make)


def main() -> None:
    """Run the cases, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    only, rows = parser.parse_args().only, []
    for recipe, what, run in cases():
        if only in f"{recipe} {what}":
            with tempfile.TemporaryDirectory() as folder:
                rows.append((recipe, what, run(Path(folder))))
            print(*rows[-1], sep=" | ", flush=True)
    found = str(Counter(what.partition(":")[0] for _, _, what in rows))
    table = markdown_table(("recipe", "seeded", "outcome"), rows)
    lines = ["# Budgets and fallbacks", "", *machine(), "", found, "", *table, ""]
    results_page("consent").write_text("\n".join(lines))
    print(found)


if __name__ == "__main__":
    main()
