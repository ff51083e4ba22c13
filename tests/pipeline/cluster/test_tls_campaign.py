"""A real head with TLS: a campaign on its machine, and a submitted one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.campaign_runs import RAISES, write_catalog
from tests.support.heads import OWN, certificates, started_head


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
def test_campaigns_run_with_tls(tmp_path: Path) -> None:
    environ = {"RAY_AUTH_MODE": "disabled", **certificates(tmp_path / "tls")}
    with started_head(tmp_path, environ, OWN) as head:
        here = tmp_path / "here"
        job = tmp_path / "job"
        write_catalog(here, RAISES)
        command = [sys.executable, "-W", "ignore", "-m", "jobs.optimize", "catalog.yaml"]
        command += ["--address", head.gcs_address, "--tracking-uri", f"sqlite:///{here}/mlflow.db"]
        done = subprocess.run(
            command,
            cwd=here,
            env=head.environ,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        write_catalog(job, RAISES)
        for ended in (done, head.submit(job, "catalog.yaml")):
            assert ended.returncode == 1, ended.stderr
            assert "raises portable failed (source)" in ended.stdout
