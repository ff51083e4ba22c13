"""One fleet of this machine and emulated Arm machines: `make test-fleet`.

What fails there for other reasons: docs/concepts/device-classes.md#emulated-cpus.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from freezer.artifact import Artifact
from freezer.compare.gate import EAGER_REFERENCE_TOL
from freezer.hardware import DEVICE_CLASSES, PORTABLE, can_run
from tests.fleet.arm import ARM_ROOT
from tests.fleet.conftest import CLASSES, OWN, RECIPES, Fleet, Outcomes
from tests.fleet.serve import inputs
from tests.support.commands import OPEN_RAW
from tests.support.raylets import LOOPBACK, free_port, wait_until
from tests.support.services import is_ready

V1, V2, LEAST = "cpu-neoverse-v1", "cpu-neoverse-v2", "cpu-aarch64"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(not ARM_ROOT, reason="run `make test-fleet` as root"),
]


def test_each_cpu_has_its_class(fleet: Fleet) -> None:
    for name, machine in fleet.machines.items():
        done = machine.run("coldpress", "classes", "--json")
        assert json.loads(done.stdout)["classes"][0] == name


def test_doctor_warns_of_emulation_alone(fleet: Fleet) -> None:
    """Where g++ 12 dies of a precompiled header."""
    done = fleet.machines[V1].run("coldpress", "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads(done.stdout)["findings"]
    unusual = {found["check"]: found["level"] for found in findings if found["level"] != "ok"}
    assert unusual == {"device classes": "warning"}


def test_one_version_has_every_class_and_recipe(fleet: Fleet, outcomes: Outcomes) -> None:
    """No speed of an emulated CPU is published, all classes have the same weights, `portable` was
    checked on Arm, and nodes may have other builds of torch and patch versions of Python.
    """
    for model, recipes in RECIPES.items():
        version = fleet.store.version(model)
        assert version.images.keys() == {*CLASSES, PORTABLE}
        manifests = {name: fleet.store.manifest(version, name) for name in version.images}
        assert len({manifest.provenance["weights"] for manifest in manifests.values()}) == 1, model
        for name in CLASSES:
            outcome = outcomes[model, name]
            assert (outcome["verdict"], outcome["version"]) == ("published", 1), outcome
            assert (outcome["speedup"] is None) == (name != OWN)
            assert {entrant.recipe for entrant in manifests[name].freezing.entrants} == recipes
        assert manifests[PORTABLE].provenance["host"]["others"] == [DEVICE_CLASSES[LEAST].machine]
        for tool in ("torch", "python"):
            assert manifests[OWN].toolchain[tool] != manifests[LEAST].toolchain[tool]


def test_each_machine_serves_its_own_class(answers: Mapping[str, Any]) -> None:
    """With answers that agree."""
    for name, found in answers.items():
        for model in RECIPES:
            assert found[model].get("class") == name, found[model]
            expected = np.array(answers[OWN][model]["answer"])
            distance = np.array(found[model]["answer"]) - expected
            rms = np.sqrt(np.mean(np.square(distance)) / np.mean(np.square(expected)))
            assert rms <= EAGER_REFERENCE_TOL, (model, name)


def test_each_machine_verifies_what_it_pulled(
    fleet: Fleet, artifacts: Mapping[str, Artifact]
) -> None:
    for name, machine in fleet.machines.items():
        done = machine.run("coldpress", "verify", artifacts[name].folder, "--threads", 1)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{name} gives the golden outputs here" in done.stdout


def test_a_foreign_artifact_is_refused_unopened(
    fleet: Fleet, artifacts: Mapping[str, Artifact]
) -> None:
    """Its payloads are emptied, which only opening or verifying it would notice."""
    folders = {name: fleet.folder / "foreign" / name for name in CLASSES}
    for name, folder in folders.items():
        version = fleet.store.version("attention")
        for payload in fleet.store.pull(version, name, folder).manifest.payloads:
            (folder / payload.path).write_bytes(b"")
    for machine, found in fleet.served("torch", *folders.values()).items():
        for name, folder in folders.items():
            if not can_run(name, machine):
                assert found[str(folder)] == {"refused": ["class_mismatch"]}, (machine, name)


def test_a_finer_payload_dies_of_sigill(fleet: Fleet, artifacts: Mapping[str, Artifact]) -> None:
    """Without the loader, which refuses it."""
    payload = artifacts[V2].folder / artifacts[V2].manifest.payloads[0].path
    words = ("python", "-c", OPEN_RAW, payload, 1, 1, 16, 32)
    own, lesser = (fleet.machines[name].run(*words) for name in (V2, LEAST))
    assert own.returncode == 0, own.stderr
    assert lesser.returncode in (-signal.SIGILL, 128 + signal.SIGILL), lesser.stderr


def test_native_loading_imports_no_torch(fleet: Fleet, answers: Mapping[str, Any]) -> None:
    for name, found in fleet.served("native", "attention").items():
        native = found["attention"]
        assert (native["class"], native["imports_torch"]) == (name, False)
        assert native["answer"] == pytest.approx(answers[name]["attention"]["answer"], abs=1e-5)


def test_the_cpp_program_serves_its_class_alone(
    fleet: Fleet, program: Path, artifacts: Mapping[str, Artifact]
) -> None:
    for name, machine in fleet.machines.items():
        for other, artifact in artifacts.items():
            done = machine.run(program, artifact.folder)
            assert done.returncode == (other != name), done.stdout + done.stderr
            assert other == name or "_mismatch" in done.stderr


def test_the_service_answers_on_arm(fleet: Fleet, answers: Mapping[str, Any]) -> None:
    port, log = free_port(), fleet.folder / "service.log"
    words = ("attention", "--store", fleet.store.root, "--threads", 1, "--port", port)
    command = ("python", "-m", "infra.serving.service", *words)
    service = fleet.machines[V2].popen(*command, log=log)
    try:
        wait_until(lambda: service.poll() is not None or is_ready(port), str(log), 300)
        body = {"src": inputs((1, 16, 32)).tolist()}
        found = requests.post(f"http://{LOOPBACK}:{port}/predict", json=body, timeout=60)
        assert found.status_code == 200, found.text
        (answer,) = found.json().values()
        expected = answers[V2]["attention"]["answer"]
        assert np.array(answer).flatten().tolist() == pytest.approx(expected, abs=1e-5)
    finally:
        service.terminate()
        assert service.wait(60) == 0, log.read_text()


def test_a_job_freezes_on_arm_workers(fleet: Fleet, outcomes: Outcomes) -> None:
    options = ("--device-class", LEAST, "--json", str(fleet.folder / "job.json"))
    done = fleet.head.submit(fleet.folder, "slow.yaml", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert fleet.outcomes("job")["slow", LEAST]["verdict"] == "published"
