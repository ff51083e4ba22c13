"""jobs.optimize without a campaign: exit codes of errors before and after it, --explain and
--check.
"""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

import jobs.optimize
import pipeline
from freezer.errors import CatalogError
from pipeline.config import Config
from pipeline.reporting import CampaignReport
from tests.support.commands import invoked
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

    monkeypatch.setattr(import_module("pipeline.run"), "run", finished)
    done = invoked(
        jobs.optimize.app, tmp_path / "c.yaml", "--json", tmp_path / "folder" / "out.json"
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
    done = invoked(jobs.optimize.app, "catalog.yaml", "--store", tmp_path / "store", *arguments)
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
def test_explain_plans_all_classes_without_ray(tmp_path: Path) -> None:
    catalog = written(tmp_path, "auto, cuda-sm75")
    arguments = [catalog, "--explain", "--store", str(tmp_path / "store")]
    done = invoked(jobs.optimize.app, *arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for name in (HERE, "cuda-sm75"):
        assert f"good {name}: build torchscript-frozen; judge (never done)" in done.output
    assert "good portable: build portable; judge (never done)" in done.output


@pytest.mark.usefixtures("without_ray")
def test_check_reads_the_catalog_alone(tmp_path: Path) -> None:
    catalog = written(tmp_path, "auto")
    arguments = [catalog, "--check", "--store", str(tmp_path / "store")]
    done = invoked(jobs.optimize.app, *arguments, catch_exceptions=False)
    assert (done.exit_code, done.stdout) == (0, f"{catalog}: entries: 1, errors: 0\n")
    written(tmp_path, "no-such-class")
    done = invoked(jobs.optimize.app, *arguments, catch_exceptions=False)
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
    done = invoked(jobs.optimize.app, *arguments, "--store", tmp_path / "store")
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
        return CampaignReport(
            campaign="c", started=0.0, finished=1.0, outcomes=(), interrupted=len(passes) == 3
        )

    monkeypatch.setattr(import_module("pipeline.run"), "run", run)
    done = invoked(jobs.optimize.app, "mlflow:", "--watch", "1")
    assert (done.exit_code, passes) == (130, [0, 1, 2])


REFUSED = """
models:
  - {name: cache, source: "transformers:gpt", inputs: {input_ids: {shape: [1, 8], dtype: int64}}}
  - {name: code, source: "transformers:own"}
  - {name: good, source: "transformers:gpt"}
"""
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 30, "model_type": "gpt2"}
OWN = {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModel": "own.M"}}


@pytest.mark.usefixtures("without_ray")
def test_check_refuses_what_a_run_would(tmp_path: Path) -> None:
    for name, config in {"gpt": {**GPT, "architectures": ["GPT2LMHeadModel"]}, "own": OWN}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "c.yaml").write_text(REFUSED)
    done = invoked(jobs.optimize.app, tmp_path / "c.yaml", "--check")
    assert done.exit_code == 2
    codes = re.findall(r"^(CP-[\w-]+): entry '(\w+)'", done.stderr, re.MULTILINE)
    assert codes == [("CP-OUTPUTS", "cache"), ("CP-TRUST", "code")]


def test_variables_of_other_tools_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    configs: list[Config] = []

    def run(config: Config, display: object) -> CampaignReport:
        configs.append(config)
        return CampaignReport(campaign="c", started=0.0, finished=1.0, outcomes=())

    monkeypatch.setattr(import_module("pipeline.run"), "run", run)
    monkeypatch.setattr("pipeline.cluster.in_child", lambda drive: drive())
    assert invoked(jobs.optimize.app, "c.yaml").exit_code == 0
    configs.append(pipeline.Config(catalog=[pipeline.Entry(name="a", source="python:m:f")]))
    for config in configs:
        assert config.tracking_uri == "http://mlflow:5000"
        assert "head:6379" in config.places
