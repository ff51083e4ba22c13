"""Whole campaigns on a real local Ray: outcomes, resume, interrupts, and what people and programs are shown."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

import freezer
from freezer.hardware.device_classes import PORTABLE, best_level
from freezer.hardware.machine import detect
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from freezer.store.store import Store
from pipeline.ledger.campaign_record import CampaignRecord
from pipeline.ledger.ledger import Ledger
from pipeline.workspace.staging import staging_folder

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
LEVEL = best_level(detect().classes)

CATALOG = """
defaults: {{recipes: [torchscript-frozen]}}
models:
  - {{name: good, source: "python:campaign_models:good", inputs: [{{shape: [batch, 16]}}], dims: {{batch: {{min: 1, max: 8}}}}}}
  - {{name: halves, source: "python:campaign_models:halves", inputs: {{x: {{shape: [2, 64]}}}}}}
  - {{name: drifting, source: "python:campaign_models:random_weights", inputs: [{{shape: [1, 16]}}]}}
  - {{name: raises, source: "python:campaign_models:raises", inputs: [{{shape: [1, 16]}}]}}
  - {{name: hangs, source: "python:campaign_models:hangs", inputs: [{{shape: [1, 16]}}], limits: {{timeout_s: 5}}}}
"""

SHIPPED = """
defaults: {{recipes: [torchscript-frozen]}}
models:
  - {{name: good, source: "python:campaign_models:good", inputs: [{{shape: [batch, 16]}}], dims: {{batch: {{min: 1, max: 8}}}}}}
  - name: file
    source: torchscript:linear.pt
    inputs: {{input: {{shape: [n, 16]}}}}
    dims: {{n: {{min: 2, max: 8}}}}
    samples: samples.safetensors
"""

SLOW_CATALOG = """
defaults: {{recipes: [torchscript-frozen]}}
models:
{entries}
"""


def environment(home: Path) -> dict[str, str]:
    """A home of its own: a local Ray writes a token into it."""
    return {**os.environ, "HOME": str(home), "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}


def write_catalog(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).parent / "models" / "campaign_models.py", folder)
    path = folder / "catalog.yaml"
    path.write_text(text)
    return path


def drive(folder: Path, campaign: str = "test") -> list[str]:
    """The command of a quick campaign."""
    script = ROOT / "tests" / "pipeline" / "drive.py"
    paths = [folder / "catalog.yaml", folder / "store", f"sqlite:///{folder}/mlflow.db", campaign, folder / "out.json"]
    return [sys.executable, str(script), *(str(path) for path in paths)]


def run(command: list[str], home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(home), cwd=home, capture_output=True, text=True, timeout=400, check=False)


def outcomes(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    report = json.loads((folder / "out.json").read_text())
    return {(item["model"], item["device_class"]): item for item in report["outcomes"]}


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A finished campaign of good and bad models."""
    folder = tmp_path_factory.mktemp("campaign")
    write_catalog(folder, CATALOG.format())
    return folder, run(drive(folder), folder)


def test_a_failure_is_one_outcome_while_the_others_finish(
    campaign: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = campaign
    assert done.returncode == 1, done.stdout + done.stderr
    found = outcomes(folder)
    assert len(found) == 10
    assert found["good", "portable"]["verdict"] == "published"
    assert found["good", str(LEVEL)]["verdict"] in ("published", "kept-eager")
    assert found["halves", "portable"]["verdict"] == "published"
    expected = {
        "drifting": "CP-WEIGHTS-DIFFER: .* other weights",
        "raises": "CP-SOURCE: .* ValueError: no weights at hand",
        "hangs": "CP-TIMEOUT: did not end within 5 s",
    }
    for model, reason in expected.items():
        outcome = found[model, "portable"]
        assert outcome["verdict"] == "failed", model
        assert re.match(reason, outcome["reason"]), model
        assert outcome["artifact"] is None


def test_the_json_is_as_the_contract_says(campaign: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = campaign
    report = json.loads((folder / "out.json").read_text())
    assert list(report) == ["campaign", "started", "finished", "exit_code", "outcomes"]
    assert (report["campaign"], report["exit_code"]) == ("test", 1)
    good = outcomes(folder)["good", "portable"]
    assert list(good) == [
        *("model", "device_class", "verdict", "cached", "recipe", "reason", "num_threads", "speedup", "speedup_ci", "drift"),
        *("latency_ms", "artifact", "version", "build_s", "judge_s"),
    ]
    assert list(good["drift"]) == ["error_ratio", "max_abs_err", "sqnr_db", "margin"]
    assert list(good["latency_ms"]) == ["eager_p50", "p50", "p90", "p99"]
    assert good["version"] == 1
    assert good["artifact"].startswith("sha256:")
    assert good["num_threads"] == len(os.sched_getaffinity(0))
    assert not good["cached"]


def test_a_finished_campaign_builds_nothing_again(campaign: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = campaign
    before = Store.open(str(folder / "store")).version("good")
    shutil.copy(folder / "out.json", folder / "first.json")
    done = run(drive(folder, "another"), folder)
    found = outcomes(folder)
    assert found["good", "portable"]["cached"]
    assert found["raises", "portable"]["cached"], "a failure of the model is kept until its key changes"
    assert not found["hangs", "portable"]["cached"], "a failure of the circumstances is tried again"
    assert " built good" not in done.stdout
    assert "unchanged: published" in done.stdout
    assert Store.open(str(folder / "store")).version("good") == before
    (folder / "first.json").replace(folder / "out.json")


def test_the_store_serves_what_was_published(campaign: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = campaign
    model = freezer.load("good", store=str(folder / "store"), threads=len(os.sched_getaffinity(0)))
    sys.path.insert(0, str(folder))
    try:
        from campaign_models import good  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(folder))
    x = torch.randn(5, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(x), good().eval()(x))


def test_mlflow_serves_the_same_by_alias(campaign: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = campaign
    script = f"""
import mlflow, numpy as np
mlflow.set_tracking_uri("sqlite:///{folder}/mlflow.db")
for alias in ("portable", "{LEVEL}"):
    model = mlflow.pyfunc.load_model("models:/good@" + alias, model_config={{"threads": {len(os.sched_getaffinity(0))}}})
    print(alias, model.predict({{"input_0": np.ones((3, 16), dtype=np.float32)}}).shape)
runs = mlflow.search_runs(search_all_experiments=True)
print(sorted(set(runs["tags.coldpress.kind"])), (runs["tags.coldpress.model"] == "good").sum())
"""
    done = run([sys.executable, "-W", "ignore", "-c", script], folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["portable (3, 16)", f"{LEVEL} (3, 16)"]
    assert "campaign" in done.stdout


def test_nothing_is_left_behind(campaign: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = campaign
    work = folder / "store" / ".coldpress"
    assert list((work / "staging").iterdir()) == []
    assert not (work / "judged").exists() or list((work / "judged").iterdir()) == []
    mine = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]
    assert mine == []


def wait_for(process: subprocess.Popen[str], words: str, timeout_s: float = 120) -> str:
    """Read lines until one holds the words."""
    assert process.stdout is not None
    seen = ""
    deadline = time.monotonic() + timeout_s
    for line in process.stdout:
        seen += line
        if words in line:
            return seen
        if time.monotonic() > deadline:
            break
    raise AssertionError(f"{words!r} was not said:\n{seen}")


def slow_catalog(folder: Path, count: int) -> Path:
    entries = "\n".join(
        f'  - {{name: m{i}, source: "python:campaign_models:slow_to_build", args: {{width: {8 + i}, seconds: 2.0}}, '
        f"inputs: [{{shape: [1, {8 + i}]}}]}}"
        for i in range(count)
    )
    return write_catalog(folder, SLOW_CATALOG.format(entries=entries))


def built_in(text: str) -> set[str]:
    """`model class recipe` of each build that a log says was done."""
    return {" ".join(line.split()[2:5]) for line in text.splitlines() if line.split()[1:2] == ["built"]}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_driver_loses_nothing_and_repeats_no_finished_build(tmp_path: Path, how: signal.Signals) -> None:
    slow_catalog(tmp_path, 3)
    command = [sys.executable, "-u", *drive(tmp_path)[1:], PORTABLE]
    with subprocess.Popen(command, env=environment(tmp_path), cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        first = wait_for(process, " built m1")
        process.send_signal(how)
        rest = process.communicate(timeout=60)[0]
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    done = built_in(first + (rest or ""))
    assert done
    time.sleep(5)  # the cluster of a driver that was killed ends by itself
    again = run([*drive(tmp_path), PORTABLE], tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert built_in(again.stdout).isdisjoint(done)
    found = outcomes(tmp_path)
    assert {name: outcome["verdict"] for name, outcome in found.items()} == {(f"m{i}", PORTABLE): "published" for i in range(3)}
    assert list((tmp_path / "store" / ".coldpress" / "staging").iterdir()) == []
    store = Store.open(str(tmp_path / "store"))
    assert [store.versions(f"m{i}") for i in range(3)] == [[1], [1], [1]]


@pytest.fixture
def silent_mlflow() -> Iterator[str]:
    """A server that says that it is well, and answers nothing else."""
    ended = threading.Event()

    class Silent(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.endswith("/health"):
                ended.wait()
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        ended.set()
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("num_interrupts", [1, 2])
def test_an_interrupt_while_mlflow_is_waited_for_keeps_the_report_and_says_what_is_left_to_do(
    tmp_path: Path, silent_mlflow: str, num_interrupts: int
) -> None:
    """The first of two interrupts a model that hangs, and then MLflow is waited for; so it is after the last outcome."""
    bad, hanging = CATALOG.format().splitlines()[-2:]
    models = [bad.replace("raises, ", "failing, "), *([hanging.replace("timeout_s: 5", "timeout_s: 600")] * (num_interrupts - 1))]
    write_catalog(tmp_path, "\n".join(["defaults: {recipes: [torchscript-frozen]}", "models:", *models]))
    places = ["--store", str(tmp_path / "store"), "--tracking-uri", silent_mlflow, "--json", str(tmp_path / "out.json")]
    command = [sys.executable, "-u", "-m", "jobs.optimize", "catalog.yaml", *places, "--device-class", PORTABLE]
    with subprocess.Popen(
        command, env=environment(tmp_path), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        said = wait_for(process, "outcome failing portable failed")
        for _ in range(num_interrupts):
            time.sleep(12)  # what an interrupted task may take to end, and more
            assert process.poll() is None, said
            process.send_signal(signal.SIGINT)
        said += process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    replay = f"python -m jobs.replay catalog --store {tmp_path}/store --tracking-uri {silent_mlflow}"
    assert f"the store and the ledger are complete, and `{replay}` brings it up to date" in said
    assert "Traceback" not in said
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["exit_code"], [item["model"] for item in report["outcomes"]]) == (130, ["failing"])
    shown = run([sys.executable, "-m", "jobs.status", "catalog", "--store", str(tmp_path / "store")], tmp_path).stdout
    assert f"1 of {num_interrupts} outcomes: 1 failed" in shown
    assert ("finished, exit code 1" if num_interrupts == 1 else "interrupted, exit code 130") in shown


@pytest.mark.slow
def test_mlflow_that_is_down_stops_nothing_and_is_caught_up_later(tmp_path: Path) -> None:
    write_catalog(tmp_path, CATALOG.format().split("  - {name: halves")[0])
    command = [*drive(tmp_path), PORTABLE]
    (tracking,) = (i for i, word in enumerate(command) if word.startswith("sqlite:"))
    down = [*command[:tracking], "http://127.0.0.1:9", *command[tracking + 1 :]]
    done = run(down, tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert Store.open(str(tmp_path / "store")).versions("good") == [1]
    places = ["--store", str(tmp_path / "store"), "--tracking-uri", command[tracking]]
    for logged, unchanged in ((len(outcomes(tmp_path)), 0), (0, len(outcomes(tmp_path)))):
        replayed = run([sys.executable, "-m", "jobs.replay", "test", *places], tmp_path)
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert f"campaign test: {logged} outcomes logged, {unchanged} already there" in replayed.stdout
    script = "import mlflow, sys; mlflow.set_tracking_uri(sys.argv[1]); print(len(mlflow.MlflowClient().search_model_versions()))"
    count = run([sys.executable, "-W", "ignore", "-c", script, command[tracking]], tmp_path)
    assert int(count.stdout) >= 1, count.stderr


def optimize(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    store = [] if "--store" in arguments else ["--store", str(folder / "store")]
    paths = [*store, "--tracking-uri", f"sqlite:///{folder}/mlflow.db"]
    return run([sys.executable, "-m", "jobs.optimize", str(folder / "catalog.yaml"), *paths, *arguments], folder)


def write_bad_entry(folder: Path) -> None:
    """A catalog of a good entry and a bad one."""
    text = CATALOG.format().split("  - {name: halves")[0] + '  - {name: Bad, source: "python:campaign_models:good"}\n'
    write_catalog(folder, text)


def test_bad_entries_stop_everything_unless_told_to_keep_going(tmp_path: Path) -> None:
    write_bad_entry(tmp_path)
    done = optimize(tmp_path)
    assert done.returncode == 2
    assert "CP-ENTRY-NAME: catalog.yaml:" in done.stderr
    assert "entry 'Bad', field 'name'" in done.stderr
    assert not (tmp_path / "store").exists(), "nothing was started"
    explained = optimize(tmp_path, "--keep-going", "--explain", "--json", str(tmp_path / "new" / "folder" / "out.json"))
    assert explained.returncode == 0, explained.stderr
    assert json.loads((tmp_path / "new" / "folder" / "out.json").read_text())["exit_code"] == 0
    assert f"good {LEVEL}: build torchscript-frozen; judge (never done)" in explained.stdout
    assert "Bad auto: nothing (CP-ENTRY-NAME: " in explained.stdout


@pytest.mark.slow
def test_the_good_entries_run_where_one_is_told_to_keep_going(tmp_path: Path) -> None:
    write_bad_entry(tmp_path)
    going = optimize(tmp_path, "--keep-going", "--device-class", PORTABLE, "--json", str(tmp_path / "out.json"))
    assert going.returncode == 1, going.stderr
    found = outcomes(tmp_path)
    assert found["good", "portable"]["verdict"] == "published"
    assert found["Bad", "auto"]["verdict"] == "failed"
    assert found["Bad", "auto"]["reason"].startswith("CP-ENTRY-NAME: catalog.yaml:")


def test_explain_only_reads_and_works_beside_the_driver_of_the_campaign(tmp_path: Path) -> None:
    write_catalog(tmp_path, CATALOG.format().split("  - {name: halves")[0])
    store = Store.open(str(tmp_path / "store"), create=True)
    with staging_folder(str(store.root)) as mine:
        killed = mine.with_name(mine.name.replace(f"~{os.getpid()}~", "~999999999~"))
        killed.mkdir()
        with Ledger(store, "catalog") as ledger:  # this process is the driver
            record = CampaignRecord(catalog="catalog.yaml", started=1.0, members=())
            ledger.append("campaign", "catalog", model="", device_class="", data=record.to_json())
            (ledger.folder / ".catalog@half.partial").touch()
            before = {path.name: path.read_bytes() for path in ledger.folder.iterdir() if path.suffix != ".json"}
            explained = optimize(tmp_path, "--explain", "--device-class", PORTABLE)
            assert explained.returncode == 0, explained.stdout + explained.stderr
            assert "good portable: build portable; judge (never done)" in explained.stdout
            ledger.check()  # the lease is this process's still
            assert {path.name: path.read_bytes() for path in ledger.folder.iterdir() if path.suffix != ".json"} == before
        assert {path.name for path in mine.parent.iterdir()} == {mine.name, killed.name}
    assert not (tmp_path / "mlflow.db").exists()


def test_a_report_that_could_not_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    write_catalog(tmp_path, CATALOG.format())
    done = optimize(tmp_path, "--json", str(tmp_path / "catalog.yaml" / "out.json"))
    assert done.returncode == 2
    assert re.search(r"^CP-USAGE: --json .*/catalog\.yaml is no folder; name a path within one$", done.stderr, re.MULTILINE)
    assert not (tmp_path / "store").exists(), "nothing was started"


def test_a_class_that_no_node_serves_is_an_error_before_any_work(tmp_path: Path) -> None:
    write_catalog(tmp_path, CATALOG.format().split("  - {name: halves")[0])
    done = optimize(tmp_path, "--device-class", "cuda-sm90")
    assert done.returncode == 3
    assert "no node serves cuda-sm90" in done.stderr
    assert "built" not in done.stdout


@pytest.mark.skipif(LEVEL != "cpu-x86-64-v4", reason="needs a CPU of x86-64-v4, to be told to be a lesser one")
@pytest.mark.slow
def test_a_worker_told_to_be_of_a_lesser_class_builds_and_judges_under_its_limits(tmp_path: Path) -> None:
    write_catalog(tmp_path, CATALOG.format().split("  - {name: halves")[0])
    done = optimize(tmp_path, "--device-class", "cpu-x86-64-v3", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = outcomes(tmp_path)
    assert set(found) == {("good", "cpu-x86-64-v3"), ("good", "portable")}
    if found["good", "cpu-x86-64-v3"]["verdict"] == "published":
        store = Store.open(str(tmp_path / "store"))
        host = store.manifest(store.version("good"), "cpu-x86-64-v3").provenance["host"]
        assert host["environment"]["ONEDNN_MAX_CPU_ISA"] == "AVX2"
        assert host["classes"][0] == "cpu-x86-64-v3"


HIDES = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0
"""Whether a process may be started from which a folder is hidden, as it is from another machine."""


@pytest.fixture
def head(tmp_path: Path) -> Iterator[str]:
    """The address of a cluster of one node with labels, which does not see the folder `driver` where name spaces can hide it."""
    (tmp_path / "driver").mkdir()
    hidden = []
    if HIDES:
        hidden = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {tmp_path}/driver && exec "$@"', "sh"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray = str(Path(sys.executable).with_name("ray"))
    labels = f"coldpress.dev/{LEVEL}=true"
    options = ["--num-cpus=2", "--include-dashboard=false", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
    # In /tmp itself: the paths of Ray's sockets must stay below 108 characters.
    temporary = tempfile.mkdtemp(prefix="cp-ray-", dir="/tmp")
    place = ["--node-ip-address=127.0.0.1", f"--port={port}", f"--labels={labels}", f"--temp-dir={temporary}"]
    with (
        (tmp_path / "ray.log").open("w") as log,
        subprocess.Popen(
            [*hidden, ray, "start", "--head", *place, *options],
            env=environment(tmp_path),
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            for _ in range(600):
                if "Ray runtime started" in (tmp_path / "ray.log").read_text():
                    break
                assert process.poll() is None, (tmp_path / "ray.log").read_text()
                time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)
            shutil.rmtree(temporary, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.skipif(LEVEL is None, reason="needs a CPU of x86-64-v3 or better")
def test_a_campaign_joins_a_cluster_that_shares_nothing_with_it_but_the_store(tmp_path: Path, head: str) -> None:
    folder = tmp_path / "driver"
    write_catalog(folder, SHIPPED.format())
    save_file({"0/input": torch.ones(2, 16), "1/input": torch.zeros(8, 16)}, folder / "samples.safetensors")
    with torchscript_deprecations_silenced():
        torch.jit.save(torch.jit.script(torch.nn.Linear(16, 3)), str(folder / "linear.pt"))
    done = optimize(folder, "--address", head, "--json", str(folder / "out.json"), "--store", str(tmp_path / "store"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Ray has 1 node(s) for portable, {LEVEL}" in done.stdout
    assert {model: outcome["verdict"] for (model, name), outcome in outcomes(folder).items() if name == "portable"} == {
        "good": "published",
        "file": "published",
    }
    assert (tmp_path / "store" / ".coldpress" / "sources").is_dir() == HIDES
    other = "cpu-x86-64-v3" if LEVEL != "cpu-x86-64-v3" else "cpu-x86-64-v4"
    refused = optimize(folder, "--address", head, "--device-class", other, "--store", str(tmp_path / "store"))
    assert refused.returncode == 3
    assert "CP-NO-NODE: entry 'good': no node serves" in refused.stderr
    if HIDES:
        unseen = optimize(folder, "--address", head, "--store", str(folder / "store"))
        assert unseen.returncode == 3
        assert "CP-STORE-UNSHARED: 1 node(s) do not see the store" in unseen.stderr


def test_a_cluster_that_does_not_answer_is_infrastructure(tmp_path: Path) -> None:
    write_catalog(tmp_path, CATALOG.format().split("  - {name: halves")[0])
    done = optimize(tmp_path, "--address", "127.0.0.1:9")
    assert done.returncode == 3
    assert "Ray at 127.0.0.1:9 cannot be reached" in done.stderr
