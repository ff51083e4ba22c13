"""A real head with TLS: drivers with and without the right certificates."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.campaign_runs import RAISES, write_catalog
from tests.support.heads import OWN, Head, certificates, started_head

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("openssl") is None, reason="needs openssl to make certificates"
    ),
]

BOUND_S = 60.0
"""Time limit for a driver to report a mismatch."""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    home = tmp_path_factory.mktemp("home")
    with started_head(
        home, {"RAY_AUTH_MODE": "disabled", **certificates(home / "tls")}, OWN
    ) as found:
        yield found


def optimize(
    head: Head, folder: Path, environ: Mapping[str, str], address: str = ""
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a driver on this machine; return its result and duration."""
    write_catalog(folder, RAISES)
    words = [
        "catalog.yaml",
        "--address",
        address or head.gcs_address,
        "--tracking-uri",
        f"sqlite:///{folder}/mlflow.db",
    ]
    command = [sys.executable, "-W", "ignore", "-m", "jobs.optimize", *words]
    started = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=400, check=False
    )
    return done, time.monotonic() - started


def test_matching_certificates_work(head: Head, tmp_path: Path) -> None:
    done, _ = optimize(head, tmp_path / "here", head.environ)
    assert (done.returncode, "raises portable failed (source)" in done.stdout) == (1, True), (
        done.stdout + done.stderr
    )
    write_catalog(tmp_path / "job", RAISES)
    submitted = head.submit(tmp_path / "job", "catalog.yaml")
    assert (submitted.returncode, "raises portable failed (source)" in submitted.stdout) == (
        1,
        True,
    ), submitted.stderr


@pytest.mark.parametrize(
    "what", ["none", "incomplete", "of another authority", "for another address"]
)
def test_a_driver_with_wrong_certificates_fails_fast(head: Head, tmp_path: Path, what: str) -> None:
    environ = dict(head.environ)
    if what == "of another authority":
        environ |= certificates(tmp_path / "other")
    elif what != "for another address":
        for name in [
            name
            for name in environ
            if name.startswith("RAY_TLS") or (what == "none" and name == "RAY_USE_TLS")
        ]:
            del environ[name]
    address = head.gcs_address.replace(OWN, "127.0.0.3") if what == "for another address" else ""
    done, took_s = optimize(head, tmp_path / "c", environ, address)
    assert done.returncode == 3, done.stdout + done.stderr
    assert took_s < BOUND_S
    assert "CP-RAY-TLS: " in done.stderr
    assert "RAY_TLS_SERVER_CERT" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
