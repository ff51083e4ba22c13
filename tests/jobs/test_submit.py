"""`coldpress submit` and `status`, with and without a real head that requires a token."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freezer.errors import UsageError
from freezer.store import Store
from jobs.results import status_app
from jobs.submit import app, checked_options
from pipeline.cluster import Job, gather, job_prefix, stage, working_dir
from pipeline.ledger import CampaignRecord, Ledger, Member
from pipeline.sources import named_files
from tests.support.campaign_runs import HANGS, RAISES, write_catalog
from tests.support.commands import Done, finished, invoked
from tests.support.heads import Head, started_head
from tests.support.raylets import ROOT

PLACES = ["--store", "/shared/store", "--tracking-uri", "http://127.0.0.1:5000"]

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
    ],
)
def test_invalid_options_are_rejected_before_submission(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UsageError, match=message):
        checked_options(arguments)


def uploaded(folder: Path) -> set[str]:
    """Return the files of a staged working directory besides Coldpress's own."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if name.partition("/")[0] not in working_dir.PACKAGES}


SECRETS = (
    *(".env", "prod.env", ".git/config", "service-account.json", "kubeconfig", "cosign.key"),
    *("terraform.tfstate", "server.crt", "mlflow.db", "store/.coldpress/x", "notes/a.txt"),
)
"""Files beside a catalog that none of its entries names."""


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")


def test_only_what_is_named_is_sent(tmp_path: Path) -> None:
    """A project's folder has keys, tokens and state of other tools."""
    folder = tmp_path / "proj"
    catalog = write_catalog(folder, RAISES)
    write_files(folder, *SECRETS)
    write_files(tmp_path, "more.txt", "prod.env", "config/a.yaml", "config/.env")
    include = ["more.txt", "config"]
    upload = gather("proj/catalog.yaml", include, tmp_path, named=named_files(catalog))
    assert upload.catalog == "proj/catalog.yaml"
    stage(upload.files, tmp_path / "staged")
    named = {"proj/catalog.yaml", "proj/campaign_models.py"}
    assert uploaded(tmp_path / "staged") == {*named, "more.txt", "config/a.yaml"}
    assert {"freezer/__init__.py", "pipeline/run.py", "jobs/optimize.py"} <= set(upload.files)
    assert not upload.left_out
    elsewhere = gather(str(catalog), [], folder / "notes", named=named_files(catalog))
    assert elsewhere.catalog == "catalog/catalog.yaml"
    assert "catalog/campaign_models.py" in elsewhere.files
    assert gather("/on/the/cluster.yaml", [], tmp_path).catalog == "/on/the/cluster.yaml"
    with pytest.raises(UsageError, match=r"catalog 'nowhere.yaml' does not exist"):
        gather("nowhere.yaml", [], tmp_path)
    write_files(tmp_path, "jobs/results.py")
    with pytest.raises(UsageError, match=r"would replace Coldpress's jobs/results\.py"):
        gather(None, ["jobs"], tmp_path)


NAMES = """
models:
  - {name: a, source: "torchscript:data/weights.bin", samples: data/x.safetensors}
  - {name: b, source: "python:campaign_models:raises", files: ["data/u*", "/abs/*", "d*"]}
  - {name: c, source: "transformers:bert/", samples: ../outside.npz}
  - {name: d, source: "transformers:org/bert", samples: "https://x/y.npz"}
  - {name: e, source: "python:uses:make", samples: linked.npz}
"""


def test_named_files_and_imports_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "proj"
    catalog = write_catalog(folder, NAMES)
    write_files(folder, *SECRETS, "data/weights.bin", "data/x.safetensors", "data/users.bin")
    write_files(folder, "data/token", "data/more/z.bin", "bert/config.json", "bert/sub/model.bin")
    write_files(folder, "bert/.token", "unused.py", "helps.py")
    (folder / "uses.py").write_text("import helps\nimport numpy\n")
    write_files(tmp_path, "outside.npz", "secret")
    for link in ("linked.npz", "data/u-linked", "bert/linked"):
        (folder / link).symlink_to(tmp_path / "secret")
    monkeypatch.chdir(folder)
    upload = gather("catalog.yaml", ["data/more"], folder, named=named_files(catalog))
    stage(upload.files, tmp_path / "staged")
    assert uploaded(tmp_path / "staged") == {
        *("catalog.yaml", "campaign_models.py", "uses.py", "helps.py"),
        *("data/weights.bin", "data/x.safetensors", "data/users.bin", "data/more/z.bin"),
        *("bert/config.json", "bert/sub/model.bin"),
    }
    outside = [folder / "bert/linked", folder / "data/u-linked", folder / "linked.npz"]
    assert upload.left_out == sorted(map(str, [*outside, tmp_path / "outside.npz"]))


def test_a_dry_run_lists_files_and_submits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_catalog(tmp_path, NAMES)
    write_files(tmp_path, "bert/config.json")
    (tmp_path / "bert" / "linked").symlink_to("/etc/hostname")
    monkeypatch.chdir(tmp_path)
    done = invoked(app, "catalog.yaml", *PLACES, "--address", "http://127.0.0.1:9", "--dry-run")
    assert done.exit_code == 0, done.output
    assert re.search(
        r"^would submit \d+ files, \d\.\d MB\n",
        done.output,
    )
    assert "  bert/config.json (0.0 kB)\n" in done.output
    assert f"  not sent: {tmp_path}/bert/linked (" in done.output


@pytest.mark.parametrize(
    ("status", "code", "verdict"),
    [
        *[("SUCCEEDED", 0, 0), ("FAILED", 1, 1), ("FAILED", 2, 2), ("FAILED", 130, 130)],
        *[("FAILED", 137, 3), ("FAILED", None, 3), ("STOPPED", None, 130)],
    ],
)
def test_the_exit_code_is_the_jobs_own(status: str, code: int | None, verdict: int) -> None:
    assert Job(id="j", status=status, message="", exit_code=code).verdict == verdict


# Status


def status(*arguments: str) -> Done:
    program = "from jobs.results import status_app; status_app()"
    command = (sys.executable, "-W", "ignore", "-c", program, *arguments)
    return finished(*command, cwd=ROOT, timeout_s=120)


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
        shown = invoked(status_app, "c", "--store", tmp_path, "--json")
        assert shown.exit_code == 0, shown.stderr
        found: dict[str, Any] = json.loads(shown.stdout)
        lease = (ledger.folder / "lease-c.json").read_text()
    assert (found["state"], found["planned"], found["built"]) == ("running", 3, 1)
    dead = json.loads(lease) | {"pid_started": 1}
    (ledger.folder / "lease-c.json").write_text(json.dumps(dead))
    text = invoked(status_app, "c", "--store", tmp_path).stdout
    assert "its driver is dead: `coldpress optimize c.yaml --campaign c --store " in text
    unknown = invoked(status_app, "d", "--store", tmp_path)
    assert (unknown.exit_code, "has no campaign 'd'; it has: c" in unknown.stderr) == (2, True)


# On a head


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    with started_head(tmp_path_factory.mktemp("home"), token) as found:
        yield found


@pytest.mark.cluster
@pytest.mark.slow
def test_a_wrong_token_is_reported(head: Head, tmp_path: Path) -> None:
    write_catalog(tmp_path, RAISES)
    wrong = head.submit(tmp_path, "catalog.yaml", RAY_AUTH_TOKEN="f" * 64)
    assert wrong.returncode == 3
    assert wrong.stderr.startswith("CP-RAY-TOKEN: ")


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
    places = ["c", "--store", str(tmp_path / "store")]
    for _ in range(60):
        shown = status(*places, "--json")
        if shown.returncode == 0 and json.loads(shown.stdout)["planned"]:
            break
        time.sleep(1)
    found = json.loads(shown.stdout)
    assert (found["state"], found["planned"]) == ("running", 1)
    ray = str(Path(sys.executable).with_name("ray"))
    stop = [ray, "job", "stop", f"{prefix}1", "--no-wait", "--address", head.address]
    subprocess.run(stop, env=head.environ, check=True, capture_output=True)
    for _ in range(60):
        found = json.loads(status(*places, "--json").stdout)
        if found["state"] != "running":
            break
        time.sleep(1)
    assert (found["state"], found["exit_code"]) == ("interrupted", 130)
    (tmp_path / "catalog.yaml").write_text(RAISES)
    again = head.submit(tmp_path, "catalog.yaml", "--campaign", "c")
    assert again.returncode == 1, again.stdout + again.stderr
    assert f"submitted {prefix}2" in again.stdout
    assert "outcome raises portable failed (source) CP-SOURCE" in again.stdout
    ended = status(*places).stdout
    assert re.search(r"campaign c of catalog.yaml: finished\n.* with exit code 1\n", ended)
    assert "raises portable: failed: CP-SOURCE: " in ended
