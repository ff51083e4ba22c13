"""jobs.submit and jobs.status, with and without a real head that requires a token."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from freezer.errors import UsageError
from freezer.store import Store
from jobs.status import app as status_app
from jobs.submit import app, checked_options
from pipeline.cluster import Job, gather, job_prefix, stage, working_dir
from pipeline.ledger import CampaignRecord, Ledger, Member
from pipeline.sources import named_files
from tests.support.campaign_runs import HANGS, RAISES, write_catalog
from tests.support.heads import Head, started_head

ROOT = Path(__file__).parents[2]
PLACES = ["--store", "/shared/store", "--tracking-uri", "http://127.0.0.1:5000"]

WORKS = """
defaults: {recipes: [torchscript-frozen], device_classes: [portable]}
models:
  - name: works
    source: "python:campaign_models:slow_to_build"
    args: {width: 16, seconds: 0.0}
    inputs: [{shape: [1, 16]}]
"""


# Checks before the submission


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["c.yaml"], r"--store '\./store' is relative, but a job runs in a temporary folder"),
        (
            ["c.yaml", "--store", "/s"],
            r"--tracking-uri 'sqlite:///mlflow.db' is relative.*sqlite:////PATH",
        ),
        (["c.yaml", *PLACES, "--json", "out.json"], r"--json 'out.json' is relative"),
        (["c.yaml", *PLACES, "--bogus"], r"No such option: --bogus"),
        (PLACES, r"(?i)missing argument 'catalog'"),
        (["c.yaml", *PLACES, "--recipe", "nonsense"], r"nonsense"),
        (
            ["c.yaml", *PLACES, "--device-class", "cpu-z80"],
            r"unknown device class 'cpu-z80'; expected ",
        ),
        (
            ["c.yaml", *PLACES, "--check", "--metrics", "127.0.0.1:9105"],
            r"--check and --metrics exclude each other",
        ),
    ],
)
def test_invalid_options_are_rejected_before_submission(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        checked_options(arguments)


def uploaded(folder: Path) -> set[str]:
    """Return the files of a staged working directory besides Coldpress's own."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if name.partition("/")[0] not in working_dir.PACKAGES}


def write_files(folder: Path) -> None:
    """Write what a project's folder has besides its models."""
    texts = {
        **dict.fromkeys(
            (
                ".git/config",
                "store/.coldpress/x",
                "pushed/m/oci-layout",
                "env/pyvenv.cfg",
                "__pycache__/m.pyc",
            ),
            "",
        ),
        **dict.fromkeys(
            (
                "cosign.key",
                "ca.PEM",
                "mlflow.db",
                "mlflow.db-wal",
                "out/payloads/p.so",
                "out/manifest.json",
            ),
            "",
        ),
        **dict.fromkeys(
            (
                "data/weights.bin",
                "data/kept.bin",
                "data/users.db",
                "notes/a.txt",
                "nested/b.log",
            ),
            "x",
        ),
        "deploy_key": "-----BEGIN OPENSSH PRIVATE KEY-----\n",
        "cache": "SQLite format 3\0",
        ".gitignore": "data/\nnotes/\n",
        ".coldpressignore": "*.log\n!notes/\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_the_working_directory_has_packages_and_catalog(tmp_path: Path) -> None:
    write_catalog(tmp_path / "proj", RAISES)
    write_files(tmp_path / "proj")
    (tmp_path / "more.txt").write_text("more")
    upload = gather("proj/catalog.yaml", ["more.txt"], tmp_path)
    assert upload.catalog == "proj/catalog.yaml"
    stage(upload.files, tmp_path / "staged")
    expected = {"catalog.yaml", "campaign_models.py", "notes/a.txt"}
    assert uploaded(tmp_path / "staged") == {*(f"proj/{name}" for name in expected), "more.txt"}
    assert {"freezer/__init__.py", "pipeline/run.py", "jobs/optimize.py"} <= set(upload.files)
    assert upload.left_out == {
        **dict.fromkeys(("proj/cosign.key", "proj/ca.PEM", "proj/deploy_key"), "a key"),
        **dict.fromkeys(("proj/mlflow.db", "proj/mlflow.db-wal", "proj/cache"), "a database"),
        **{
            "proj/store": "a store",
            "proj/pushed/m": "a store",
            "proj/out": "an artifact",
            "proj/env": "an environment",
        },
        **{"proj/data": "matches .gitignore", "proj/nested/b.log": "matches .coldpressignore"},
    }
    assert (
        gather(str(tmp_path / "proj" / "catalog.yaml"), [], tmp_path / "proj" / "data").catalog
        == "catalog/catalog.yaml"
    )
    assert gather("/on/the/cluster.yaml", [], tmp_path).catalog == "/on/the/cluster.yaml"
    with pytest.raises(UsageError, match=r"catalog 'nowhere.yaml' does not exist"):
        gather("nowhere.yaml", [], tmp_path)


NAMES = """
models:
  - {name: a, source: "torchscript:data/weights.bin", samples: data/x.safetensors}
  - {name: b, source: "python:campaign_models:raises", files: ["data/u*", "/abs/*"]}
  - {name: c, source: "transformers:bert/", samples: ../outside.npz}
  - {name: d, source: "transformers:org/bert", samples: "https://x/y.npz"}
"""


def test_named_and_included_files_are_sent_although_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "proj"
    catalog = write_catalog(folder, NAMES)
    write_files(folder)
    (folder / ".gitignore").write_text("*\n")
    (folder / ".coldpressignore").unlink()
    for name in (
        "bert/config.json",
        "bert/sub/model.bin",
        "bert/token.key",
        "data/x.safetensors",
        "data/more/z.bin",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (tmp_path / "outside.npz").write_text("x")
    monkeypatch.chdir(folder)
    upload = gather("catalog.yaml", ["data/more", "cosign.key"], folder, named=named_files(catalog))
    stage(upload.files, tmp_path / "staged")
    named = {"data/weights.bin", "data/x.safetensors", "bert/config.json", "bert/sub/model.bin"}
    assert uploaded(tmp_path / "staged") == {
        *named,
        "data/more/z.bin",
        "catalog.yaml",
        "campaign_models.py",
    }
    assert upload.left_out["data/users.db"] == "a database"
    assert upload.left_out["bert/token.key"] == upload.left_out["cosign.key"] == "a key"
    assert (
        upload.left_out[str(tmp_path / "outside.npz")]
        == "outside of the catalog's folder and the current one"
    )


def test_a_dry_run_lists_files_and_submits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_catalog(tmp_path, RAISES)
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, ["catalog.yaml", *PLACES, "--address", "http://127.0.0.1:9", "--dry-run"]
    )
    assert done.exit_code == 0, done.output
    assert re.search(
        r"^would submit \d+ files, \d\.\d MB\n  freezer, pipeline, jobs \(\d+ files\)\n",
        done.output,
    )
    assert "  catalog.yaml (0.2 kB)\n" in done.output
    assert "  not sent: cosign.key (a key)\n" in done.output


def test_a_large_working_directory_is_rejected(tmp_path: Path) -> None:
    write_catalog(tmp_path / "proj", RAISES)
    with (tmp_path / "proj" / "weights.bin").open("wb") as file:
        file.truncate(working_dir.MAX_BYTES + 1)  # a sparse file
    with pytest.raises(
        UsageError,
        match=r"have 52\d MB, expected at most 524; the largest are proj/weights.bin \(524 MB\), ",
    ):
        gather("proj/catalog.yaml", [], tmp_path)


@pytest.mark.parametrize(
    ("status", "code", "verdict"),
    [
        *[("SUCCEEDED", 0, 0), ("FAILED", 1, 1), ("FAILED", 2, 2), ("FAILED", 130, 130)],
        *[("FAILED", 137, 3), ("FAILED", None, 3), ("STOPPED", None, 130)],
    ],
)
def test_the_exit_code_is_the_jobs_own(status: str, code: int | None, verdict: int) -> None:
    job = Job(
        id="j", status=status, message="", exit_code=code, started=None, ended=None, entrypoint=""
    )
    assert job.verdict == verdict


# Status


def status(
    *arguments: str, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "jobs.status", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


def test_status_of_running_dead_and_unknown_campaigns(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path), create=True)
    members = tuple(
        Member(judge_key=f"k{i}", model=f"m{i}", device_class="portable", cached=False)
        for i in range(3)
    )
    record = CampaignRecord(catalog="c.yaml", started=time.time(), members=members)
    with Ledger(store, "c") as ledger:
        ledger.append("campaign", "c", model="", device_class="", data=record.to_json())
        ledger.append("build", "b", model="m0", device_class="portable", data={"failure": None})
        shown = CliRunner().invoke(status_app, ["c", "--store", str(tmp_path), "--json"])
        assert shown.exit_code == 0, shown.stderr
        found: dict[str, Any] = json.loads(shown.stdout)
        lease = (ledger.folder / "lease-c.json").read_text()
    assert (found["state"], found["planned"], found["built"]) == ("running", 3, 1)
    dead = json.loads(lease) | {"pid_started": 1}
    (ledger.folder / "lease-c.json").write_text(json.dumps(dead))
    text = CliRunner().invoke(status_app, ["c", "--store", str(tmp_path)]).stdout
    assert "its driver is dead: `coldpress optimize c.yaml --campaign c --store " in text
    unknown = CliRunner().invoke(status_app, ["d", "--store", str(tmp_path)])
    assert (unknown.exit_code, "has no campaign 'd'; it has: c" in unknown.stderr) == (2, True)


# On a head


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    with started_head(tmp_path_factory.mktemp("home"), token) as found:
        yield found


@pytest.mark.cluster
@pytest.mark.slow
def test_a_wrong_token_or_address_is_reported(head: Head, tmp_path: Path) -> None:
    write_catalog(tmp_path, RAISES)
    wrong = head.submit(tmp_path, "catalog.yaml", RAY_AUTH_TOKEN="f" * 64)
    assert wrong.returncode == 3
    assert re.fullmatch(
        r"CP-RAY-TOKEN: Ray at http://\S+ rejects the token \(.*\); set RAY_AUTH_MODE=token .*\n",
        wrong.stderr,
    )
    head.address, address = "http://127.0.0.1:9", head.address
    nowhere = head.submit(tmp_path, "catalog.yaml")
    head.address = address
    assert (
        nowhere.returncode,
        "CP-RAY: Ray's dashboard at http://127.0.0.1:9 does not answer" in nowhere.stderr,
    ) == (3, True)


@pytest.mark.cluster
@pytest.mark.slow
def test_submit_attaches_to_a_running_job(head: Head, tmp_path: Path) -> None:
    write_catalog(tmp_path, HANGS)
    prefix = job_prefix("c", str(tmp_path / "store"))
    first = head.submit(tmp_path, "catalog.yaml", "--campaign", "c", "--detach")
    assert (first.returncode, f"submitted {prefix}1" in first.stdout) == (0, True), (
        first.stdout + first.stderr
    )
    spelled = f"file://{tmp_path}/store/"
    second = head.submit(
        tmp_path, "catalog.yaml", "--campaign", "c", "--keep-going", "--detach", store=spelled
    )
    assert (
        f"the campaign is running already as {prefix}1; attached to it, nothing was submitted"
        in second.stdout
    ), second.stderr
    assert "with other options" in second.stdout
    places = ["c", "--store", str(tmp_path / "store"), "--address", head.address]
    for _ in range(60):
        found = json.loads(status(*places, "--json", environ=head.environ).stdout)
        assert found["job"]["status"] in ("PENDING", "RUNNING"), "shown before it has a record"
        if found.get("planned"):
            break
        time.sleep(1)
    assert (found["state"], found["planned"], found["job"]["status"]) == ("running", 1, "RUNNING")
    ray = str(Path(sys.executable).with_name("ray"))
    stop = [ray, "job", "stop", f"{prefix}1", "--no-wait", "--address", head.address]
    subprocess.run(stop, env=head.environ, check=True, capture_output=True)
    for _ in range(60):
        found = json.loads(status(*places, "--json", environ=head.environ).stdout)
        if found["job"]["status"] == "STOPPED" and found["state"] != "running":
            break
        time.sleep(1)
    assert (found["job"]["status"], found["state"], found["exit_code"]) == (
        "STOPPED",
        "interrupted",
        130,
    )
    (tmp_path / "catalog.yaml").write_text(RAISES)
    again = head.submit(tmp_path, "catalog.yaml", "--campaign", "c")
    assert again.returncode == 1, again.stdout + again.stderr
    assert f"submitted {prefix}2" in again.stdout
    assert "outcome raises portable failed (source) CP-SOURCE" in again.stdout
    ended = status(*places, environ=head.environ).stdout
    assert re.search(r"campaign c of catalog.yaml: finished, exit code 1\n", ended)
    assert "raises portable: failed: CP-SOURCE: " in ended
    assert f"job {prefix}2: FAILED" in ended
    lost = status("c", "--store", str(tmp_path / "store"), "--address", "http://127.0.0.1:9")
    assert (lost.returncode, "finished, exit code 1" in lost.stdout, "CP-RAY" in lost.stderr) == (
        3,
        True,
        True,
    )


@pytest.mark.cluster
@pytest.mark.slow
def test_ray_job_submit_runs_a_campaign_too(head: Head, tmp_path: Path) -> None:
    write_catalog(tmp_path / "project", WORKS)
    for package in working_dir.PACKAGES:
        shutil.copytree(
            ROOT / package,
            tmp_path / "project" / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    places = [
        "--store",
        str(tmp_path / "store"),
        "--tracking-uri",
        f"sqlite:///{tmp_path}/mlflow.db",
        "--campaign",
        "plain",
    ]
    ray = [
        str(Path(sys.executable).with_name("ray")),
        "job",
        "submit",
        "--address",
        head.address,
        "--working-dir",
        ".",
    ]
    command = [*ray, "--", sys.executable, "-m", "jobs.optimize", "catalog.yaml", *places]
    environ = {name: value for name, value in head.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=tmp_path / "project",
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "outcome works portable published" in done.stdout
    found = json.loads(status("plain", "--store", str(tmp_path / "store"), "--json").stdout)
    assert (found["state"], found["verdicts"]) == ("finished", {"published": 1})
    again = head.submit(tmp_path, "project/catalog.yaml", "--campaign", "plain")
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"submitted {job_prefix('plain', str(tmp_path / 'store'))}1" in again.stdout
    assert "outcome works portable unchanged: published" in again.stdout
