"""Probes of workers, and that drivers and workers import no torch."""

from __future__ import annotations

import pytest

from freezer.freezing.target.target import toolchain
from pipeline.worker.tasks import probe
from tests.steps import python


def test_probe_returns_the_toolchain() -> None:
    assert repr(probe("portable", 2).toolchain) == repr(toolchain()), "nodes are compared by it"


@pytest.mark.parametrize(
    "module", ["pipeline.run", "pipeline.worker.tasks", "pipeline.tracking.process", "jobs.optimize", "jobs.status"]
)
def test_drivers_and_workers_import_no_torch(module: str) -> None:
    """It would cost each of them two seconds and 180 MB; children import it."""
    code = f"import sys, {module}; print(sorted({{'torch', 'mlflow', 'matplotlib'}} & set(sys.modules)))"
    assert python(code).splitlines()[-1] == "[]"
