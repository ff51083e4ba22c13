"""benchmarks/peers.py on a tiny model: a contest of real processes, its page, and how a run
continues.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CATALOG = """
models:
  - name: tiny
    source: python:examples.zoo:unet
    args: {width: 4, depth: 1}
    inputs: {image: {shape: [1, 3, 16, 16], dtype: uint8, range: [0, 255]}}
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run; its store lacks the model."""
    folder = tmp_path_factory.mktemp("peers")
    (folder / "catalog.yaml").write_text(CATALOG)
    (folder / "store").mkdir()
    run(folder)
    return folder


def run(work: Path) -> str:
    command = [
        sys.executable,
        "-m",
        "benchmarks.peers",
        str(work / "catalog.yaml"),
        "--peers",
        "torchscript,coldpress",
    ]
    command += [
        "--store",
        str(work / "store"),
        "--rounds",
        "2",
        "--work",
        str(work),
        "--out",
        str(work / "page.md"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_contest_times_entrants(work: Path) -> None:
    (results,) = work.glob("results-*.jsonl")
    (contest,) = (json.loads(line) for line in results.read_text().splitlines())
    eager, torchscript, coldpress = contest["entrants"]
    assert len(eager["medians_ms"]) == len(torchscript["medians_ms"]) >= 2
    assert torchscript["sqnr_db"] is None or torchscript["sqnr_db"] > 100
    assert "NotPublishedError" in coldpress["problem"]


def test_page_has_figures_and_problems(work: Path) -> None:
    page = (work / "page.md").read_text()
    assert "| tiny | TorchScript freeze |" in page
    assert "Coldpress, published: all models: not built: NotPublishedError" in page
    assert (work / "page.png").stat().st_size > 1000


def test_interrupted_run_continues(work: Path) -> None:
    """A finished model is not measured again, and a line that was cut off is ignored."""
    (results,) = work.glob("results-*.jsonl")
    (work / "results.jsonl").write_text(results.read_text() + '{"model": "ti')
    assert "tiny: continued" in run(work)
