"""Cases of docs/reference/what-freezes.md: a model with its inputs, its outcome with a recipe, and
the rows of the page."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from freezer.errors import ColdpressError
from freezer.freezing.judging import judge, open_session
from freezer.runtime.torch_settings import threads
from freezer.spec import Dim, SamplingPolicy
from tests.support.steps import ANY_SPEED, candidate_of, random_inputs, subject_of, target_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "what-freezes.md"
RECIPES = ("torchscript-frozen", "inductor-frozen", "portable")

# What torch.export, or a judge of its program, says of many models.
VALUES = (
    r"data-dependent control flow: .* at models(_\w+)?\.py:\d+: .*; use torch\.where or torch\.cond"
)
SCRIPTED = r"torch\.export: "
FIXED = (
    r"no program takes all declared sizes of size: it needs size == 12; write 12 for size in the"
    r" shapes"
)
DIFFERS = (
    r"the exported program differs from the model on input set \d+: output 'output' is off by"
    r" up to "
)
DIFFERS_LATER = (
    "the exported program differs from the model on the second call with input set 0: output"
    " 'output' is off by up to "
)
BAKED_IN = "a value that was drawn or read during the capture .* was baked in; draw with torch"

UNTIMED = SamplingPolicy(
    time_limit_s=0.01, warmup_s=0.0, min_rounds=1, busy_limit=2.0, steal_limit=2.0
)
"""For a judgement of drift alone."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its inputs.

    Attributes:
        make: makes the model.
        inputs, dims: as of freezer.freeze.
        says: a regular expression for the message of a recipe that does not serve the model.
        exported: the same for torch.export, if its reason differs.
    """

    make: Callable[[], Any]
    inputs: Mapping[str, Any] = field(default_factory=lambda: {"x": random_inputs(2, 4)})
    dims: Mapping[str, Mapping[int, Dim]] = field(default_factory=dict)
    says: str = ""
    exported: str = ""

    def reason(self, recipe: str, cell: str) -> str:
        """The regular expression for the message of a recipe that does not serve the model."""
        by_export = recipe == "inductor-frozen" or (
            recipe == "portable" and cell == "rejected"
        )  # otherwise its trace failed too
        found = (self.exported if by_export else "") or self.says
        assert found, "a model that is not served has a reason"
        return found


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A cell of the page, and the message behind it."""

    cell: str
    message: str


def outcome_of(case: Case, recipe: str, folder: Path) -> Outcome:
    """Build and judge a model with one recipe: the capture that serves it, the code of the failure,
    or `rejected`.
    """
    with warnings.catch_warnings(record=True), torch.random.fork_rng(devices=[]), threads(1):
        warnings.simplefilter("always")
        torch.manual_seed(0)
        try:
            subject = subject_of(case.make(), case.inputs, case.dims)
            target = target_of(subject, recipe, 1)
            candidate = candidate_of(subject, recipe, folder, target)
            session = open_session(subject, target, limits=ANY_SPEED, policy=UNTIMED)
            judgement = judge(session, [candidate])
        except ColdpressError as error:
            if error.code in ("CP-DEVICE-CLASS", "CP-BETTER-CPU"):
                pytest.skip(f"in a process without the class's limits: {error}")
            return Outcome(cell=f"`{error.code}`", message=str(error))
    return Outcome(
        cell=candidate.capture if judgement.verdict == "published" else judgement.verdict,
        message=judgement.reason,
    )


def rows_of(heading: str, recipes: Sequence[str] = RECIPES) -> dict[str, dict[str, str]]:
    """The rows of the page's tables under a second-level heading: for each model, the cell of every
    recipe and the remedy.
    """
    part = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in part.splitlines()
        if line.startswith("|")
    ]
    heads = (*recipes, "remedy")
    return {
        row[0]: dict(zip(heads, row[1:], strict=True))
        for row in cells
        if row[0] and not row[0].startswith("---")
    }


def failed(cell: str) -> bool:
    """Whether a cell says that nothing serves the model."""
    return cell.startswith("`") or cell == "rejected"
