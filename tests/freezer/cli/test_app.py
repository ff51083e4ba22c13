"""The command `coldpress`: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from freezer.artifact import Artifact, Manifest
from freezer.freezing.freeze import FreezeOptions, FreezeResult, freeze_source
from freezer.hardware import DEVICE_CLASSES, detect
from freezer.store import Store
from tests.conftest import Frozen
from tests.freezer.cli.conftest import Run
from tests.support.commands import output, sampling
from tests.support.models import mlp
from tests.support.steps import HERE, QUICK, copy_of, flip_a_byte, random_inputs
from tests.support.wrong_inputs import ARRAY_FILES, TENSOR_FILES, npy

ROOT = Path(__file__).parents[3]

QUICKLY = sampling(0.3, 0.1, 1) + "from freezer.cli.app import main; main()"
"""The command with a quick sampling policy, for which it has no option."""


# Reading


def test_classes(coldpress: Run) -> None:
    code, out, _ = coldpress("classes")
    assert code == 0
    lines = [line.split() for line in out.splitlines() if not line.startswith("not ")]
    names = [words[0] for words in lines]
    assert tuple(names) == detect().classes
    assert {words[-1] for words in lines} == {"hardware"}
    code, out, _ = coldpress("classes", "--json")
    assert json.loads(out)["classes"] == names


def test_pull_selects_the_class_of_this_machine(
    coldpress: Run, published: Store, tmp_path: Path
) -> None:
    for name, options in ((HERE, ()), ("portable", ("--device-class", "portable"))):
        place = ("--store", published.root, "--dest", tmp_path / name)
        code, out, _ = coldpress("pull", "mlp:1", *place, *options)
        assert (code, f"mlp:1 for {name} is in {tmp_path / name}" in out) == (0, True)
        assert Artifact.read(tmp_path / name).manifest.device_class == name


@pytest.mark.parametrize("command", ["pull", "verify", "run"])
def test_older_versions_are_refused(
    coldpress: Run, published: Store, tmp_path: Path, command: str
) -> None:
    save_file({"x": random_inputs(2, 4)}, tmp_path / "x.safetensors")
    more = {
        "pull": ["--dest", tmp_path / "pulled"],
        "verify": [],
        "run": ["--input", tmp_path / "x.safetensors", "--output", tmp_path / "y.safetensors"],
    }[command]
    arguments = (command, "mlp", "--store", published.root, *more, "--min-version")
    code, _, err = coldpress(*arguments, 2)
    assert code == 1
    assert "rolled_back: got version 1, expected version 2 or later" in err
    assert not (tmp_path / "pulled").exists()
    assert coldpress(*arguments, 1)[0] == 0


def test_inspect_prints_words_or_json(coldpress: Run, published: Store, scripted: Frozen) -> None:
    code, out, _ = coldpress("inspect", "mlp", "--store", published.root)
    assert code == 0
    for part in (
        "mlp, version 1",
        HERE,
        "portable",
        "torchscript-frozen: trace -> torchscript",
        "x: float32",
        "batch from 1 to 4",
    ):
        assert part in out
    code, out, _ = coldpress("inspect", scripted.artifact.folder, "--json")
    assert Manifest.from_bytes(out.encode(), origin="stdout") == scripted.artifact.manifest


# Exit codes


def test_exit_code_1_refused(
    coldpress: Run, published: Store, scripted: Frozen, tmp_path: Path
) -> None:
    damaged = copy_of(scripted.artifact, tmp_path / "damaged")
    flip_a_byte(damaged.folder / damaged.manifest.payloads[0].path)
    place = ("--store", published.root)
    pulled = (*place, "--dest", tmp_path / "x")
    for code, arguments in (
        ("CP-INTEGRITY", ("verify", damaged.folder)),
        ("CP-NOT-PUBLISHED", ("inspect", tmp_path)),
        ("CP-NOT-PUBLISHED", ("inspect", "none", *place)),
        ("CP-NOT-PUBLISHED", ("pull", "mlp:9", *pulled)),
        ("CP-NOT-PUBLISHED", ("pull", "mlp", *pulled, "--device-class", "cuda-sm75")),
        ("CP-INCOMPATIBLE", ("verify", scripted.artifact.folder, "--device-class", "portable")),
    ):
        exit_code, _, err = coldpress(*arguments)
        assert (exit_code, err.partition(":")[0]) == (1, code), err


def test_exit_code_2_usage(
    coldpress: Run, published: Store, scripted: Frozen, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    freeze = ("freeze", "python:tests.support.models:mlp", "--out", tmp_path / "out")
    broken = ("freeze", "python:tests.support.models:broken", "--out")
    pull = ("pull", "mlp", "--store", published.root, "--dest")
    for code, arguments in (
        ("CP-USAGE", (*pull, tmp_path / "full")),
        ("CP-DEVICE-CLASS", (*pull, tmp_path / "x", "--device-class", "none")),
        ("CP-SPEC", (*freeze, "--inputs", '{"x": {"shape": ["n"]}}')),
        ("CP-SAMPLES", (*freeze, "--inputs", "none.npz")),
        ("CP-USAGE", (*freeze, "--limit", "size_mb_max")),
        ("CP-USAGE", (*freeze, "--args", "[256]")),
        ("CP-USAGE", (*freeze, "--inputs", "4")),
        ("CP-USAGE", (*freeze, "--point", "batch")),
        ("CP-USAGE", (*freeze, "--limit", "memory_gb=4")),
        ("CP-USAGE", (*freeze, "--inputs", '{"x": {"shape": [2, 4]}}', "--recipe", "none")),
        ("CP-SPEC", freeze),
        ("CP-USAGE", ("verify", scripted.artifact.folder, "--speed")),
        ("CP-USAGE", ("run", scripted.artifact.folder, "--input", "x.npz", "--output", "y.txt")),
        ("CP-USAGE", (*broken, tmp_path / "full")),
        ("CP-USAGE", (*broken, ".")),
    ):
        exit_code, _, err = coldpress(*arguments)
        assert (exit_code, err.partition(":")[0]) == (2, code), err
    assert coldpress("no-such-command")[0] == 2


def test_exit_code_3_unreachable(coldpress: Run, tmp_path: Path) -> None:
    for arguments in (
        ("inspect", "mlp"),
        ("verify", "mlp"),
        ("pull", "mlp", "--dest", tmp_path / "x"),
    ):
        code, _, err = coldpress(*arguments, "--store", tmp_path / "none")
        assert (code, "is not there" in err) == (3, True), err


# Run


def test_run_matches_eager(coldpress: Run, scripted: Frozen, tmp_path: Path) -> None:
    sets = {f"{index}/": random_inputs(batch, 4, seed=batch) for index, batch in enumerate((1, 4))}
    given, written = tmp_path / "x.safetensors", tmp_path / "new" / "out.safetensors"
    for expected in ({"": sets["0/"]}, sets):
        save_file({f"{prefix}x": x for prefix, x in expected.items()}, given)
        places = ("--input", given, "--output", written)
        code, _, err = coldpress("run", scripted.artifact.folder, *places)
        assert code == 0, err
        found = load_file(written)
        assert len(found) == len(expected)
        for prefix, x in expected.items():
            torch.testing.assert_close(found[f"{prefix}output"], mlp()(x).detach())


WRONG_FILES = [
    *((f"{name}.safetensors", content) for name, content in TENSOR_FILES.items()),
    *((f"{name}.npz", content) for name, content in ARRAY_FILES.items()),
    ("array.npy", npy("<f4", (2, 4), bytes(32))),
    ("array", b""),
]


@pytest.mark.parametrize(("name", "content"), WRONG_FILES, ids=[name for name, _ in WRONG_FILES])
def test_run_refuses_wrong_input_files(
    coldpress: Run, scripted: Frozen, tmp_path: Path, name: str, content: bytes
) -> None:
    given, written = tmp_path / name, tmp_path / "y.safetensors"
    given.write_bytes(content)
    places = ["--input", given, "--output", written]
    code, _, err = coldpress("run", scripted.artifact.folder, *places)
    *_, line = err.splitlines()
    assert (code, line.partition(": ")[0]) in [(1, "CP-CONTRACT"), (2, "CP-SAMPLES")], err
    assert not written.exists()


def test_run_reports_a_failing_payload(
    coldpress: Run, scripted: Frozen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        inputs = scripted.artifact.manifest.inputs

        def leaves(self, **inputs: Any) -> Any:
            raise IndexError("index out of range in self")

    monkeypatch.setattr("freezer.serving.load.load", lambda *_, **__: Failing())
    given = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(2, 4)}, given)
    places = ["--input", given, "--output", tmp_path / "y.safetensors"]
    code, _, err = coldpress("run", scripted.artifact.folder, *places)
    assert (code, "CP-CONTRACT: " in err, "IndexError" in err) == (1, True, True), err


# Freeze


@pytest.mark.slow
@pytest.mark.skipif(
    "cpu-x86-64-v3" not in detect({}).classes, reason="this machine is not x86-64-v3"
)
def test_freeze_applies_the_limits_of_a_class(tmp_path: Path) -> None:
    out = tmp_path / "v3"
    words = (
        *("freeze", "python:tests.support.models:mlp", "--args", '{"hidden": 64}', "--out", out),
        *("--inputs", '{"x": {"shape": ["batch", 4]}}', "--dims", '{"batch": {"max": 4}}'),
        *("--recipe", "torchscript-frozen", "--device-class", "cpu-x86-64-v3"),
    )
    # where it is not faster than eager, the portable program is written
    output(sys.executable, "-c", QUICKLY, *words)
    manifest = Artifact.read(out).manifest
    assert manifest.device_class in ("cpu-x86-64-v3", "portable")
    host = manifest.provenance["host"]
    assert host["environment"].items() >= DEVICE_CLASSES["cpu-x86-64-v3"].limits.items()
    assert host["classes"] == ["cpu-x86-64-v3", "portable"]


@pytest.fixture
def quick_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freezing with a quick sampling policy, for which the command has no option."""

    def quickly(*args: Any, options: FreezeOptions, **kwargs: Any) -> FreezeResult:
        return freeze_source(*args, options=replace(options, policy=QUICK), **kwargs)

    monkeypatch.setattr("freezer.freezing.freeze.freeze_source", quickly)


@pytest.mark.usefixtures("quick_judge")
def test_freeze_keeps_limits(coldpress: Run, tmp_path: Path) -> None:
    source = (
        "python:tests.support.models:mlp",
        "--inputs",
        '{"x": {"shape": [2, 4]}}',
        "--recipe",
        "torchscript-frozen",
        "--threads",
        1,
    )
    limits = ("--limit", "speedup_min=0.001", "--limit", "size_mb_max=0.0001")
    code, out, err = coldpress("freeze", *source, *limits, "--out", tmp_path / "out")
    assert code == 0, err
    assert "kept-eager: " in out
    assert "MB; size_mb_max is 0.0001" in out
