"""The canary: run the golden inputs on the machine that will serve, and apply the gate's formula to
the outputs.
"""

from __future__ import annotations

from freezer.artifact import GOLDEN_INPUTS, GOLDEN_OUTPUTS, Artifact
from freezer.compare.numerics import comparable, distances, doubles, exact_problem
from freezer.runtime.devices import tensors_on
from freezer.runtime.frozen_model import FrozenModel
from freezer.runtime.tensor_files import golden_inputs, golden_outputs, load_tensors
from freezer.runtime.tensors import leaves_of
from freezer.serving.golden_check import (
    CanaryFigure,
    Comparison,
    check_figures,
    golden_figures,
    smallest_sets,
)

TENSORS = Comparison(
    comparable=comparable,
    exact_problem=exact_problem,
    distances=lambda r, c, limits: distances(r, c, limits=limits),
    doubles=doubles,
)
"""How to compare tensors."""


def run_canary(
    artifact: Artifact, model: FrozenModel, *, smallest: bool = False
) -> list[CanaryFigure]:
    """Run the golden sets; for a stateful model without a reset method only the first, which starts
    from the initial state.

    Args:
        artifact, model: of one folder.
        smallest: run one set of each payload, the smallest, and the others only if one of these
            differs: outputs of few elements are judged over all sets. Ignored for stateful models.

    Raises:
        CanaryError: an output differs from the golden one.
    """
    figures = canary_figures(artifact, model, smallest=smallest)
    if smallest and any(figure.problem for figure in figures) and not artifact.manifest.stateful:
        figures = canary_figures(artifact, model)
    check_figures(artifact.manifest, figures)
    return figures


def canary_figures(
    artifact: Artifact, model: FrozenModel, *, smallest: bool = False
) -> list[CanaryFigure]:
    """Run golden sets and compare, without raising for differences; see `run_canary`."""
    manifest = artifact.manifest
    inputs = golden_inputs(manifest, artifact.folder / GOLDEN_INPUTS, load_tensors)
    golden = golden_outputs(manifest, artifact.folder / GOLDEN_OUTPUTS, load_tensors)
    reset = manifest.recipe.reset
    indices = list(range(1 if manifest.stateful and not reset else len(inputs)))
    if smallest and not manifest.stateful:
        indices = smallest_sets(manifest, inputs, model.payload_for)
    answers = {}
    for index in indices:
        if index and reset:
            model.preserved[reset]()
        given = tensors_on(inputs[index], model.device)
        answers[index] = [leaf.cpu() for leaf in leaves_of(model(**given))]
    return golden_figures(manifest, golden, answers, TENSORS)
