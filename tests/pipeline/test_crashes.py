"""A campaign that is killed with -9 at any instant and restarted ends like an undisturbed one, and
repeats nothing.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from freezer.files import digest_bytes
from freezer.store import Store
from pipeline.ledger import ledger_folder, read_rows
from tests.conftest import Frozen
from tests.support.shown import logged, shown
from tests.support.steps import HERE

ROOT = Path(__file__).parents[2]

TRANSIENT = ("judged/*", "staging/*", "ledger/*lease*")
"""What no campaign leaves."""

Trial = Callable[[Path, int], tuple[int, int]]


@pytest.fixture(scope="module")
def run(scripted: Frozen, portable: Frozen, template: Path) -> Iterator[Trial]:
    """Run the campaign in a folder and kill it at an instant (0: never); return its wait status and
    number of instants.
    """
    folders = [f"{HERE}={scripted.artifact.folder}", f"portable={portable.artifact.folder}"]
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.crashing", *folders]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        asked, answers = server.stdin, server.stdout

        def ask(folder: Path, die_at: int) -> tuple[int, int]:
            folder.mkdir(exist_ok=True)
            if not (folder / "mlflow.db").exists():
                shutil.copy(template / "mlflow.db", folder)
            asked.write(f"{folder} {die_at}\n")
            asked.flush()
            line = answers.readline()
            if line == "ready\n":
                line = answers.readline()
            status, num = line.split()
            return int(status), int(num)

        yield ask
        asked.close()


@pytest.fixture(scope="module")
def undisturbed(run: Trial, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[str]]:
    """The number of instants of an undisturbed campaign, and its end state."""
    folder = tmp_path_factory.mktemp("undisturbed")
    status, num = run(folder, 0)
    assert status >> 8 == 1, "some models fail"
    return num, ended(folder)


def ended(folder: Path) -> list[str]:
    """Return the end state of a campaign: store, ledger and MLflow, without paths and times."""
    store = Store.open(str(folder / "store"))
    work = store.root / ".coldpress"
    for path in store.root.glob("*/blobs/sha256/*"):
        assert digest_bytes(path.read_bytes()) == f"sha256:{path.name}", path
    rows: dict[str, Any] = {}
    for row in sorted(read_rows(ledger_folder(store)), key=lambda row: row.time):
        times = dict.fromkeys(("finished", "wall_s", "peak_bytes"))
        if row.kind != "build":
            rows[f"{row.kind} {row.key} {row.model}"] = {**row.data, **times}
    uri = f"sqlite:///{folder}/mlflow.db"
    mlflow = logged(uri)
    for name in ("versions", "descriptions"):
        mlflow[name] = sorted(mlflow[name].items())
    runs = [
        run for run in shown(uri)["runs"].values() if "outcomes/total" in run["data"]["metrics"]
    ]
    (parent,) = runs
    summary = Path(parent["info"]["artifact_uri"].removeprefix("file://"), "summary.json")
    state = {
        "files": sorted(store.root.glob("[!.]*/**/*")),
        **{pattern: sorted(work.glob(pattern)) for pattern in (*TRANSIENT, "candidates/*")},
        "partial": list(store.root.rglob("*.partial")),
        "rows": rows,
        "mlflow": mlflow,
        "summary": json.loads(summary.read_text()),
    }
    text = json.dumps(state, indent=1, sort_keys=True, default=str)
    return text.replace(str(folder), "FOLDER").splitlines()


def killed_and_started_again(
    run: Trial, folder: Path, instants: Sequence[int], expected: list[str]
) -> None:
    """Kill each start of a campaign at an instant; after the last one, which is not killed, the end
    state is as expected.
    """
    for die_at in instants:
        status, _ = run(folder, die_at)
        assert status == signal.SIGKILL
    status, _ = run(folder, 0)
    assert status >> 8 == 1, "the exit code of an undisturbed campaign"
    assert ended(folder) == expected, f"killed at instants {instants}"
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "num_kills", [2, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_kill_loses_and_repeats_nothing(
    run: Trial, undisturbed: tuple[int, list[str]], tmp_path: Path, num_kills: int
) -> None:
    num, expected = undisturbed
    assert num > 100
    for pattern in (*TRANSIENT, "partial"):
        assert f' "{pattern}": [],' in expected
    for die_at in random.Random(num).sample(range(1, num + 1), num_kills):
        killed_and_started_again(run, tmp_path / str(die_at), [die_at], expected)
