"""`coldpress doctor` in processes of its own: findings on this machine and on worse ones, and its
exit codes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.support.commands import finished

COMMAND = (sys.executable, "-m", "freezer.cli")

Findings = dict[str, dict[str, str]]


def doctor(
    *arguments: object, command: tuple[str, ...] = COMMAND, **environ: str
) -> tuple[int, Findings]:
    """The exit code and the findings by check."""
    env = {**os.environ, "RAY_ADDRESS": "", **environ}
    done = finished(*command, "doctor", "--json", *arguments, env=env)
    assert "Traceback" not in done.stderr, done.stderr
    report = json.loads(done.stdout)
    findings = {finding["check"]: finding for finding in report["findings"]}
    levels = [finding["level"] for finding in report["findings"]]
    assert report["num_errors"] == levels.count("error")
    assert report["num_warnings"] == levels.count("warning")
    assert all(bool(item["remedy"]) == (item["level"] != "ok") for item in findings.values())
    return done.returncode, findings


def test_doctor_without_errors_exits_with_0(tmp_path: Path) -> None:
    code, findings = doctor("--store", tmp_path)
    assert code == 0, findings
    checks = ["torch", "device classes", "temporary folder", "compiler"]
    assert [name for name in findings if name != "GPU"] == [*checks, "Ray", "MLflow", "store"]
    for check in ("torch", "compiler", "Ray", "MLflow", "store"):
        assert findings[check]["level"] == "ok", findings[check]
    assert list(tmp_path.iterdir()) == []


def test_a_machine_with_problems(tmp_path: Path) -> None:
    """No compiler, limited instructions, a folder without space for files, and no store."""
    code, findings = doctor(
        *("--store", tmp_path / "none"),
        PATH=str(tmp_path),
        ONEDNN_MAX_CPU_ISA="SSE41",
        COLDPRESS_TMPDIR="/proc",
    )
    assert code == 1
    for check in ("temporary folder", "store"):
        assert findings[check]["level"] == "error", findings[check]
    assert findings["compiler"]["level"] == "warning"
    assert findings["device classes"]["remedy"] == "unset ONEDNN_MAX_CPU_ISA"
    assert "CP-STORE-UNREACHABLE" in findings["store"]["text"]


def test_a_broken_torch_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('undefined symbol')")
    for start, expected in (
        (f"sys.path.insert(0, {str(tmp_path)!r})", (1, "error")),
        ("sys.modules['torch'] = None", (0, "warning")),  # engines serve without it
    ):
        program = f"import sys; {start}; from freezer.cli import main; main()"
        code, findings = doctor(command=(sys.executable, "-c", program))
        assert (code, findings["torch"]["level"]) == expected
