"""jobs.optimize without a campaign: exit codes of errors before and after it, --explain and
--check.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import jobs.optimize
from freezer.errors import CatalogError
from pipeline.campaign import Config
from pipeline.reporting import CampaignReport
from tests.support.steps import HERE

CATALOG = """
defaults: {recipes: [torchscript-frozen]}
models:
  - {name: good, source: "python:mod:make", inputs: [{shape: [1, 16]}], device_classes: [%s]}
"""


def test_an_unwritable_json_file_exits_with_3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def finished(config: Config, display: object) -> CampaignReport:
        (tmp_path / "folder").touch()
        return CampaignReport(campaign="c", started=0.0, finished=1.0, outcomes=())

    monkeypatch.setattr("pipeline.run.run", finished)
    done = CliRunner().invoke(
        jobs.optimize.app,
        [str(tmp_path / "c.yaml"), "--json", str(tmp_path / "folder" / "out.json")],
    )
    assert done.exit_code == 3
    assert re.fullmatch(r"CP-INFRASTRUCTURE: .*cannot be written: .*\n", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("arguments", "address"),
    [([], "http://head:8265"), (["--address", "https://h:1"], "https://h:1")],
)
def test_the_address_of_a_dashboard_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    done = CliRunner().invoke(
        jobs.optimize.app, ["catalog.yaml", "--store", str(tmp_path / "store"), *arguments]
    )
    assert done.exit_code == 2
    assert done.stderr.startswith(f"CP-USAGE: the address {address!r}"), done.stderr
    assert not (tmp_path / "store").exists()


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", refused)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def written(folder: Path, device_class: str) -> str:
    (folder / "mod.py").write_text("def make(): ...\n")
    (folder / "catalog.yaml").write_text(CATALOG % device_class)
    return str(folder / "catalog.yaml")


@pytest.mark.usefixtures("without_ray")
def test_explain_needs_no_ray(tmp_path: Path) -> None:
    arguments = [written(tmp_path, "auto"), "--explain", "--store", str(tmp_path / "store")]
    done = CliRunner().invoke(jobs.optimize.app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert f"good {HERE}: build torchscript-frozen; judge (never done)" in done.output
    assert "good portable: build portable; judge (never done)" in done.output


@pytest.mark.usefixtures("without_ray")
def test_explain_plans_classes_of_other_machines(tmp_path: Path) -> None:
    arguments = [written(tmp_path, "cuda-sm75"), "--explain", "--store", str(tmp_path / "store")]
    done = CliRunner().invoke(jobs.optimize.app, arguments, catch_exceptions=False)
    assert "cuda-sm75: this machine does not serve it" in done.output
    assert "good cuda-sm75: build torchscript-frozen; judge (never done)" in done.output


@pytest.mark.usefixtures("without_ray")
def test_check_reads_the_catalog_alone(tmp_path: Path) -> None:
    catalog = written(tmp_path, "auto")
    arguments = [catalog, "--check", "--store", str(tmp_path / "store")]
    done = CliRunner().invoke(jobs.optimize.app, arguments, catch_exceptions=False)
    assert (done.exit_code, done.stdout) == (0, f"{catalog}: entries: 1, errors: 0\n")
    written(tmp_path, "no-such-class")
    done = CliRunner().invoke(jobs.optimize.app, arguments, catch_exceptions=False)
    assert done.exit_code == 2
    assert "no-such-class" in done.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["c.yaml", "--trust"], "CP-USAGE: --trust only applies to `mlflow:` catalogs"),
        (
            ["c.yaml", "--explain", "--json", "out.json"],
            "CP-USAGE: --explain and --json exclude each other",
        ),
        (
            ["c.yaml", "--check", "--json", "out.json"],
            "CP-USAGE: --check and --json exclude each other",
        ),
        (
            ["c.yaml", "--device-class", "auto", "--device-class", "cpu-z80"],
            "CP-DEVICE-CLASS: unknown device class 'cpu-z80'",
        ),
    ],
)
def test_options_without_an_effect_are_rejected(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    done = CliRunner().invoke(jobs.optimize.app, [*arguments, "--store", str(tmp_path / "store")])
    assert done.exit_code == 2
    assert done.stderr.replace("\n", " ").startswith(said)
    assert not (tmp_path / "store").exists()


def test_watch_repeats_until_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that is empty or cannot be reached is tried again."""
    passes: list[int] = []

    def run(config: Config, display: object) -> CampaignReport:
        passes.append(len(passes))
        if len(passes) == 1:
            raise CatalogError("no models", code="CP-CATALOG-EMPTY")
        ended = len(passes) == 3
        return CampaignReport(
            campaign="c", started=0.0, finished=1.0, outcomes=(), interrupted=ended
        )

    monkeypatch.setattr("pipeline.run.run", run)
    done = CliRunner().invoke(jobs.optimize.app, ["mlflow:", "--watch", "1"])
    assert (done.exit_code, passes) == (130, [0, 1, 2])
