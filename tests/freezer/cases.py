"""Models of docs/what-freezes.md: what is tried, what became of it, and the page's own rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from freezer.errors import ColdpressError
from freezer.freezing.validation.judge import judge
from freezer.limits import SamplingPolicy
from freezer.runtime.threads import threads
from freezer.spec.inputs import Dim
from tests.steps import ANY_SPEED, candidate_of, random_inputs, subject_of, target_of

PAGE = Path(__file__).parents[2] / "docs" / "what-freezes.md"
RECIPES = ("torchscript-frozen", "inductor-frozen", "portable")

VARIANTS = ("torchscript-exact", "torchscript-optimized")
"""Recipes that take what torchscript-frozen takes."""

VALUES = r"data-dependent control flow: .* at models(_corners)?\.py:\d+: .*; use torch\.where or torch\.cond"
SCRIPTED = r"the model holds TorchScript \(part\), which torch\.export does not look into"
FIXED = "no program takes all declared sizes of size: it needs size == 12; write 12 for size in the shapes"
DIFFERS = r"the exported program differs from the model on input set \d+: output 'output' is off by up to "
DIFFERS_LATER = "the exported program differs from the model on the second call with input set 0: output 'output' is off by up to "
BAKED_IN = "what it drew or read while it was captured .* was baked in; draw with torch"
"""What torch.export, or a judge of its program, says of many models."""

UNTIMED = SamplingPolicy(time_limit_s=0.01, warmup_s=0.0, min_rounds=1, busy_limit=2.0, steal_limit=2.0)
"""Drift alone is asked for."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what it takes.

    Attributes:
        make: gives the model.
        inputs, dims: as of freezer.freeze.
        says: a regular expression for the message where a recipe does not serve the model.
        exported: the same for what is made by torch.export, where that has another reason.
    """

    make: Callable[[], Any]
    inputs: Mapping[str, Any] = field(default_factory=lambda: {"x": random_inputs(2, 4)})
    dims: Mapping[str, Mapping[int, Dim]] = field(default_factory=dict)
    says: str = ""
    exported: str = ""

    def reason(self, recipe: str, cell: str) -> str:
        """What the message of a recipe that does not serve the model must match: the model's own reason."""
        by_export = recipe == "inductor-frozen" or (recipe == "portable" and cell == "rejected")  # else its trace has failed too
        found = (self.exported if by_export else "") or self.says
        assert found, "a model that is not served has a reason"
        return found


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a model: a cell of the page, and the message behind it."""

    cell: str
    message: str


def outcome_of(case: Case, recipe: str, folder: Path) -> Outcome:
    """Build and judge a model with one recipe: the capture that serves it, the code of what failed, or `rejected`."""
    with warnings.catch_warnings(record=True), torch.random.fork_rng(devices=[]), threads(1):
        warnings.simplefilter("always")
        torch.manual_seed(0)
        try:
            subject = subject_of(case.make(), case.inputs, case.dims)
            target = target_of(subject, recipe, 1)
            candidate = candidate_of(subject, recipe, folder, target)
            judgement = judge(subject, [candidate], target, limits=ANY_SPEED, policy=UNTIMED)
        except ColdpressError as error:
            if error.code == "CP-DEVICE-CLASS":
                pytest.skip(f"in a process without the class's limits: {error}")
            return Outcome(cell=f"`{error.code}`", message=str(error))
    return Outcome(cell=candidate.capture if judgement.verdict == "published" else judgement.verdict, message=judgement.reason)


def rows_of(heading: str) -> dict[str, dict[str, str]]:
    """The rows of the page's tables under a heading of the second level: by feature, the cell of every recipe and what to know."""
    part = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines() if line.startswith("|")]
    heads = ("", *RECIPES, "remedy")
    return {row[0]: dict(zip(heads[1:], row[1:], strict=True)) for row in cells if row[0] and not row[0].startswith("---")}


def pairs(heading: str, cases: Mapping[str, Case]) -> list[Any]:
    """Every row and recipe, as parameters of a test. What takes a C++ compiler to find out is slow."""
    rows = rows_of(heading)
    return [
        pytest.param(name, recipe, marks=[pytest.mark.slow] if _compiles(recipe, rows.get(name, {}).get(recipe, "")) else [])
        for name in cases
        for recipe in RECIPES
    ]


def variants(heading: str, cases: Mapping[str, Case]) -> list[Any]:
    """Every row that torchscript-frozen serves and each of VARIANTS, as parameters of a test; the one that does less is slow."""
    rows = rows_of(heading)
    served = [name for name in cases if not failed(rows.get(name, {}).get("torchscript-frozen", "`"))]
    return [
        pytest.param(name, recipe, marks=[pytest.mark.slow] if recipe == "torchscript-exact" else [])
        for name in served
        for recipe in VARIANTS
    ]


def failed(cell: str) -> bool:
    """Whether a cell says that nothing serves."""
    return cell.startswith("`") or cell == "rejected"


def _compiles(recipe: str, cell: str) -> bool:
    """Whether a payload is compiled; one for the first sizes is, before torch.export refuses to make one for all."""
    return recipe == "inductor-frozen" and (cell[:1] != "`" or "EXPORT-DIMS" in cell)
