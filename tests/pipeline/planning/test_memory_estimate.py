"""What memory an entry asks for, by what is known without loading its model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from freezer.freezing.models.sources import Source
from freezer.limits import Limits
from pipeline.catalog.entry import Entry
from pipeline.planning.memory_estimate import BASE_BYTES, Demand, corrected, demand_of, learned

GB = 1_000_000_000


def entry(source: Source, limits: Limits | None = None, files: tuple[Path, ...] = ()) -> Entry:
    return Entry(
        name="model",
        source=source,
        spec=None,
        samples=None,
        task_metric=None,
        limits=limits or Limits(),
        device_classes=("auto",),
        recipes=("auto",),
        files=files,
        search_path=(),
    )


def file_of(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_a_file_is_multiplied_and_what_is_made_by_code_is_taken_for_small(tmp_path: Path) -> None:
    weights = file_of(tmp_path / "model.pt", 3 * GB)
    assert demand_of(entry(Source(kind="torchscript", location=str(weights)))) == Demand(asked=16 * GB, least=3 * GB)
    python = Source(kind="python", location="models:make")
    assert demand_of(entry(python)) == Demand(asked=BASE_BYTES, least=0)
    assert demand_of(entry(python, files=(weights,))) == Demand(asked=16 * GB, least=3 * GB)
    far = Source(kind="torchscript", location="https://models.example/m.pt")
    assert demand_of(entry(far)) == Demand(asked=BASE_BYTES, least=0), "it is not fetched yet"


def test_a_folder_counts_with_all_of_its_files(tmp_path: Path) -> None:
    file_of(tmp_path / "local" / "a.safetensors", GB // 2)
    file_of(tmp_path / "local" / "deep" / "b.safetensors", GB // 2)
    found = demand_of(entry(Source(kind="transformers", location=str(tmp_path / "local"))))
    assert found == Demand(asked=8 * GB, least=GB)


def test_a_limit_counts_for_more_than_an_estimate_and_experience_for_more_than_a_limit(tmp_path: Path) -> None:
    weights = file_of(tmp_path / "model.pt", 3 * GB)
    limited = entry(Source(kind="torchscript", location=str(weights)), limits=Limits(memory_gb=5))
    assert demand_of(limited) == Demand(asked=5 * GB, least=5 * GB)
    assert corrected(demand_of(limited), 7 * GB) == Demand(asked=7 * GB, least=5 * GB, firm=True)
    assert demand_of(replace(limited, limits=Limits())).asked == 16 * GB


def test_what_was_seen_to_be_used_is_asked_for_by_the_tasks_that_follow() -> None:
    demand = Demand(asked=1 * GB, least=0)
    assert learned(demand, GB // 2) == demand
    assert learned(demand, 3 * GB) == Demand(asked=4 * GB, least=0)
    assert learned(corrected(demand, 20 * GB), 3 * GB).asked == 20 * GB
