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
from tests.support.shown import shown, without_ids
from tests.support.steps import HERE

ROOT = Path(__file__).parents[2]

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
def undisturbed(run: Trial, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """The number of instants of an undisturbed campaign, and its end state."""
    folder = tmp_path_factory.mktemp("undisturbed")
    status, num = run(folder, 0)
    assert status >> 8 == 1, "some models fail"
    return num, ended(folder)


def ended(folder: Path) -> dict[str, Any]:
    """Return the end state of a campaign: store, ledger and MLflow, without paths and times."""
    store = Store.open(str(folder / "store"))
    work = store.root / ".coldpress"
    files = sorted(
        str(path.relative_to(store.root))
        for name in store.models()
        for path in (store.root / name).rglob("*")
    )
    for path in store.root.glob("*/blobs/sha256/*"):
        assert digest_bytes(path.read_bytes()) == f"sha256:{path.name}", path
    rows: dict[str, tuple[float, Any]] = {}
    for row in read_rows(ledger_folder(store)):
        name = f"{row.kind} {row.key} {row.model}"
        data = {
            key: value
            for key, value in row.data.items()
            if key not in ("finished", "wall_s", "peak_bytes")
        }
        if name not in rows or rows[name][0] <= row.time:
            rows[name] = (row.time, data)
    mlflow = without_ids(shown(f"sqlite:///{folder}/mlflow.db"))
    for run in mlflow["runs"]:
        run["tags"].pop(
            "coldpress.summary", None
        )  # the digest of a summary holds the time of its end
    (parent,) = (
        run
        for run in shown(f"sqlite:///{folder}/mlflow.db")["runs"].values()
        if "outcomes/total" in run["data"]["metrics"]
    )
    summary = Path(
        parent["info"]["artifact_uri"].removeprefix("file://"), "summary.json"
    ).read_text()
    found = {
        "files": files,
        "judged": sorted(path.name for path in (work / "judged").glob("*")),
        "staging": sorted(path.name for path in (work / "staging").glob("*")),
        "candidates": sorted(path.name for path in (work / "candidates").glob("*")),
        "lease": sorted(path.name for path in (work / "ledger").glob("*lease*")),
        "partial": sorted(str(path) for path in store.root.rglob("*.partial")),
        "rows": {
            name: data for name, (_, data) in sorted(rows.items()) if not name.startswith("build")
        },
        "mlflow": {
            **mlflow,
            **{
                name: [[*key, found] for key, found in mlflow[name].items()]
                for name in ("versions", "descriptions")
            },
        },
        "summary": json.loads(summary),
    }
    return json.loads(json.dumps(found).replace(str(folder), "FOLDER"))


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Return where two end states differ, and how."""
    if isinstance(found, dict) and isinstance(expected, dict):
        names = sorted({*found, *expected})
        return [
            line
            for name in names
            for line in differences(found.get(name), expected.get(name), f"{where}/{name}")
        ]
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [
            line
            for index, (one, other) in pairs
            for line in differences(one, other, f"{where}/{index}")
        ]
    return [] if found == expected else [f"{where}: {found!r} instead of {expected!r}"]


def killed_and_started_again(
    run: Trial, folder: Path, instants: Sequence[int], expected: dict[str, Any]
) -> None:
    """Kill each start of a campaign at an instant; after the last one, which is not killed, the end
    state is as expected.
    """
    for die_at in instants:
        status, _ = run(folder, die_at)
        assert status == signal.SIGKILL
    status, _ = run(folder, 0)
    assert status >> 8 == 1, "the exit code of an undisturbed campaign"
    assert differences(ended(folder), expected) == [], f"killed at instants {instants}"
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "num_kills", [2, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_kill_loses_and_repeats_nothing(
    run: Trial, undisturbed: tuple[int, dict[str, Any]], tmp_path: Path, num_kills: int
) -> None:
    num, expected = undisturbed
    assert num > 100
    assert (
        expected["partial"] == expected["staging"] == expected["judged"] == expected["lease"] == []
    )
    for die_at in random.Random(num).sample(range(1, num + 1), num_kills):
        killed_and_started_again(run, tmp_path / str(die_at), [die_at], expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_several_kills_of_one_campaign(
    run: Trial, undisturbed: tuple[int, dict[str, Any]], tmp_path: Path
) -> None:
    num, expected = undisturbed
    draw = random.Random(0)
    for index in range(20):
        instants = [draw.randrange(num // 2, num), draw.randrange(10, 30), draw.randrange(5, 20)]
        killed_and_started_again(run, tmp_path / str(index), instants, expected)
