"""Files of infra, each checked by the tool of its kind."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.support.commands import output
from tests.support.raylets import ROOT

INFRA = ROOT / "infra"
OWN = Path(sys.executable).parent


def needs(program: str, package: str) -> pytest.MarkDecorator:
    """Skip a test without a program of Debian."""
    reason = f"{program} is missing (Debian: apt-get install {package})"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


@needs("shellcheck", "shellcheck")
def test_shellcheck_accepts_every_script() -> None:
    output("shellcheck", *INFRA.rglob("*.sh"))


def test_hadolint_accepts_every_dockerfile() -> None:
    """DL3008 wants versions of Debian's packages, which a mirror keeps for days only."""
    output(OWN / "hadolint", "--ignore", "DL3008", *INFRA.rglob("*.Dockerfile"))


@needs("systemd-analyze", "systemd")
@pytest.mark.parametrize("unit", [path.name for path in INFRA.rglob("*.service")])
def test_systemd_accepts_every_unit(unit: str, tmp_path: Path) -> None:
    (path,) = INFRA.rglob(unit)
    text = path.read_text().replace("/opt/coldpress/.venv/bin", str(Path(sys.executable).parent))
    copied = tmp_path / unit.replace("@", "@mlp")
    copied.write_text(text)
    output("systemd-analyze", "verify", "--man=no", copied)


def test_compose_file_follows_its_schema() -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    output(OWN / "check-jsonschema", *schema, INFRA / "mlflow" / "compose.yaml")
