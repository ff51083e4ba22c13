"""One fleet of this machine and emulated Arm machines: `make test-fleet`.

What fails there for other reasons: docs/concepts/device-classes.md#emulated-cpus.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import requests

from freezer.compare.gate import EAGER_REFERENCE_TOL
from freezer.hardware import PORTABLE, can_run
from freezer.store import Store
from tests.fleet.arm import ARM_ROOT, CPUS
from tests.fleet.conftest import CLASSES, MODELS, OWN, SLOW, Fleet
from tests.fleet.serve import inputs
from tests.support.commands import OPEN_RAW
from tests.support.fault_sites import Driver
from tests.support.raylets import LOOPBACK, free_port, wait_until
from tests.support.services import is_ready

V1, V2, LEAST = "cpu-neoverse-v1", "cpu-neoverse-v2", "cpu-aarch64"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(not ARM_ROOT, reason="run `make test-fleet` as root"),
]

Outcomes = Mapping[tuple[str, str], Mapping[str, Any]]


def test_doctor_names_the_class_of_each_cpu(fleet: Fleet) -> None:
    for name, machine in fleet.machines.items():
        done = machine.run("coldpress", "doctor", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        findings = {found["check"]: found for found in json.loads(done.stdout)["findings"]}
        assert findings["device classes"]["text"].split(",")[0] == name
        assert {found["level"] for found in findings.values()} == {"ok"}, findings


def test_one_version_has_every_class_and_recipe(fleet: Fleet, outcomes: Outcomes) -> None:
    store = Store.open(fleet.store)
    for model, recipes in MODELS.items():
        for name in CLASSES:
            outcome = outcomes[model, name]
            assert outcome["verdict"] == "published", outcome
            assert outcome["version"] == 1
        version = store.version(model)
        assert version.images.keys() == {*CLASSES, PORTABLE}
        for name in CLASSES:
            entrants = store.manifest(version, name).freezing.entrants
            assert {entrant.recipe for entrant in entrants} == recipes


def test_one_version_is_one_model(fleet: Fleet, outcomes: Outcomes) -> None:
    store = Store.open(fleet.store)
    for model in MODELS:
        version = store.version(model)
        manifests = [store.manifest(version, name) for name in version.images]
        assert len({manifest.provenance["weights"] for manifest in manifests}) == 1, model


def test_no_speed_of_an_emulated_cpu_is_published(outcomes: Outcomes) -> None:
    for model in MODELS:
        assert {outcomes[model, name]["speedup"] for name in CPUS} == {None}


def test_each_machine_serves_its_own_class(answers: Mapping[str, Any]) -> None:
    for name, found in answers.items():
        assert {model: served.get("class", served) for model, served in found.items()} == (
            dict.fromkeys(MODELS, name)
        )


def test_answers_agree_across_classes(answers: Mapping[str, Any]) -> None:
    for model in MODELS:
        expected = np.array(answers[OWN][model]["answer"])
        for name in CPUS:
            distance = np.array(answers[name][model]["answer"]) - expected
            rms = np.sqrt(np.mean(np.square(distance)) / np.mean(np.square(expected)))
            assert rms <= EAGER_REFERENCE_TOL, (model, name)


def test_each_machine_pulls_and_verifies(fleet: Fleet, outcomes: Outcomes) -> None:
    for name, machine in fleet.machines.items():
        for model in MODELS:
            folder = fleet.folder / "pulled" / name / model
            for words in (
                ("pull", model, "--store", fleet.store, "--dest", folder),
                ("verify", folder, "--threads", 1),
            ):
                done = machine.run("coldpress", *words)
                assert done.returncode == 0, (name, done.stdout + done.stderr)
        assert name in done.stdout


def test_a_foreign_artifact_is_refused_unopened(fleet: Fleet, outcomes: Outcomes) -> None:
    """Its payloads are emptied, which only opening or verifying it would notice."""
    store = Store.open(fleet.store)
    version = store.version("attention")
    folders = {name: fleet.folder / "foreign" / name for name in CLASSES}
    for name, folder in folders.items():
        for payload in store.pull(version, name, folder).manifest.payloads:
            (folder / payload.path).write_bytes(b"")
    for machine, found in fleet.served("torch", *folders.values()).items():
        for name, folder in folders.items():
            if not can_run(name, machine):
                assert found[str(folder)] == {"refused": ["class_mismatch"]}, (machine, name)


def test_a_finer_payload_dies_of_sigill(fleet: Fleet, outcomes: Outcomes) -> None:
    """Without the loader, which refuses it."""
    folder = fleet.folder / "finer"
    store = Store.open(fleet.store)
    payload = store.pull(store.version("attention"), V2, folder).manifest.payloads[0]
    words = ("python", "-c", OPEN_RAW, folder / payload.path, 1, 1, 16, 32)
    own, lesser = (fleet.machines[name].run(*words) for name in (V2, LEAST))
    assert own.returncode == 0, own.stderr
    assert lesser.returncode in (-signal.SIGILL, 128 + signal.SIGILL), lesser.stderr


def test_native_loading_imports_no_torch(fleet: Fleet, answers: Mapping[str, Any]) -> None:
    for name, found in fleet.served("native", "attention").items():
        native = found["attention"]
        assert native["class"] == name
        assert not native["imports_torch"]
        assert native["answer"] == pytest.approx(answers[name]["attention"]["answer"], abs=1e-5)


def test_the_service_answers_on_arm(fleet: Fleet, answers: Mapping[str, Any]) -> None:
    port = free_port()
    words = ("attention", "--store", fleet.store, "--threads", 1, "--port", port)
    log = fleet.folder / "service.log"
    command = ("python", "-m", "infra.serving.service", *words)
    service = fleet.machines[V2].popen(*command, log=log)
    try:
        wait_until(lambda: service.poll() is not None or is_ready(port), str(log), 300)
        body = {"x": inputs((1, 16, 32)).tolist()}
        found = requests.post(f"http://{LOOPBACK}:{port}/predict", json=body, timeout=60)
        assert found.status_code == 200, found.text
        (answer,) = found.json().values()
        expected = answers[V2]["attention"]["answer"]
        assert np.array(answer).flatten().tolist() == pytest.approx(expected, abs=1e-5)
    finally:
        service.terminate()
        assert service.wait(60) == 0, log.read_text()


@pytest.mark.parametrize("at", ["build", "judge"])
def test_a_killed_arm_node_loses_nothing(fleet: Fleet, outcomes: Outcomes, at: str) -> None:
    """The only node of its class dies, and joins again."""
    folder = fleet.folder / f"killed-in-{at}"
    folder.mkdir()
    (folder / "catalog.yaml").write_text(SLOW)
    driver = Driver(fleet.campaign(folder, "catalog.yaml", f"--device-class={V1}"))
    driver.wait_for(f"{at} slow {V1}")
    fleet.workers[V1].kill()
    fleet.start(V1)
    assert driver.end(1200) == 0, driver.output
    assert set(driver.built.values()) == {1}, "a finished build is used"
    found = json.loads((folder / "outcomes.json").read_text())["outcomes"]
    assert {item["device_class"]: item["verdict"] for item in found} == {
        V1: "published",
        PORTABLE: "published",
    }


def test_a_job_freezes_on_arm_workers(fleet: Fleet, outcomes: Outcomes) -> None:
    folder = fleet.folder / "job"
    folder.mkdir()
    (folder / "catalog.yaml").write_text(SLOW)
    (folder / "fleet_models.py").write_bytes((fleet.folder / "fleet_models.py").read_bytes())
    report = folder / "outcomes.json"
    options = ("--device-class", LEAST, "--json", report)
    done = fleet.head.submit(folder, "catalog.yaml", *map(str, options), store=fleet.store)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {item["verdict"] for item in json.loads(report.read_text())["outcomes"]}
    assert verdicts == {"published"}
