"""Memory estimates of entries, without loading their models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from freezer.freezing.sources import Source
from freezer.spec import Limits
from pipeline.planning import BASE_BYTES, Demand, demand_of
from tests.support.campaigns import entry

GB = 1_000_000_000


def file_of(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
    return path


def demand(folder: Path, source: Source, **changes: Any) -> Demand:
    return demand_of(replace(entry("model", folder), source=source, **changes))


def test_demand_is_a_multiple_of_the_files(tmp_path: Path) -> None:
    weights = file_of(tmp_path / "model.pt", 3 * GB)
    assert demand(tmp_path, Source(kind="torchscript", location=str(weights))) == Demand(
        asked=16 * GB, least=3 * GB
    )
    python = Source(kind="python", location="models:make")
    assert demand(tmp_path, python) == Demand(asked=BASE_BYTES, least=0)
    assert demand(tmp_path, python, files=(weights,)) == Demand(asked=16 * GB, least=3 * GB)
    far = Source(kind="torchscript", location="https://models.example/m.pt")
    assert demand(tmp_path, far) == Demand(asked=BASE_BYTES, least=0), "not fetched yet"
    file_of(tmp_path / "local" / "a.safetensors", GB // 2)
    file_of(tmp_path / "local" / "deep" / "b.safetensors", GB // 2)
    folder = Source(kind="transformers", location=str(tmp_path / "local"))
    assert demand(tmp_path, folder) == Demand(asked=8 * GB, least=GB)


def test_limit_replaces_the_estimate(tmp_path: Path) -> None:
    weights = Source(kind="torchscript", location=str(file_of(tmp_path / "model.pt", 3 * GB)))
    limited = demand(tmp_path, weights, limits=Limits(memory_gb=5))
    assert limited == Demand(asked=5 * GB, least=5 * GB)
