"""Runtime settings of a winner: what is tried, what is used, and what is recorded of the rest."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor, nn

from freezer.artifact import Artifact, ColdStart, EnvironmentRecord
from freezer.freezing.freeze import freeze
from freezer.freezing.judging import Opening, settings_gain
from freezer.spec import SamplingPolicy
from tests.support.steps import QUICK_OPTIONS, random_inputs

POLICY = SamplingPolicy(time_limit_s=120.0, block_ms=20.0, busy_limit=2.0, steal_limit=2.0)

STARTED = ColdStart(
    import_torch_ms=1e3,
    open_ms=1.0,
    first_call_ms=1.0,
    second_call_ms=1.0,
    memory_before_mb=100.0,
    memory_peak_mb=200.0,
)


class Large(nn.Module):
    """A few passes over a tensor of 2 MB, each with a new result."""

    def forward(self, x: Tensor) -> Tensor:
        return ((x + 1).relu() * 2 - 1).abs()[:, :8]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    options = replace(QUICK_OPTIONS, name="large", recipes=["torchscript-exact"], num_threads=1)
    result = freeze(
        Large().eval(),
        {"x": random_inputs(1, 500_000)},
        out=tmp_path_factory.mktemp("large") / "out",
        options=options,
    )
    assert result.artifact is not None, result.reason
    return result.artifact


@pytest.fixture
def opening(large: Artifact, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Opening:
    """The artifact, where glibc maps every tensor anew and no library but those of `tmp_path` is
    installed.
    """
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4096")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    manifest = large.manifest
    return Opening(
        folder=large.folder,
        payload=manifest.payloads[0],
        settings=manifest.recipe.settings,
        spec=manifest.inputs,
        num_threads=1,
    )


def found_by(opening: Opening, policy: SamplingPolicy = POLICY) -> EnvironmentRecord:
    found = settings_gain(opening, STARTED, policy)
    assert found is not None
    return found


@pytest.mark.slow
def test_settings_that_avoid_page_faults_gain(opening: Opening) -> None:
    found = found_by(opening)
    assert found.page_faults > 1000
    assert "GLIBC_TUNABLES" in found.variables
    assert found.gain_ci is not None
    assert found.plain_p50 is not None
    assert found.p50 is not None
    assert found.gain_ci[0] > 1.03
    assert found.p50 < found.plain_p50


@pytest.mark.slow
def test_what_does_not_work_is_recorded_with_its_reason(
    opening: Opening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two preloaded libraries one crashes the process; the other changes nothing, but two
    processes may differ in speed.
    """
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_")
    for name, body in (("libtcmalloc_minimal.so.4", "abort();"), ("libjemalloc.so.2", "")):
        code = (
            f"#include <stdlib.h>\n__attribute__((constructor)) static void start(void) {{ {body}"
            " }\n"
        )
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / name)]
        subprocess.run(command, input=code, text=True, check=True)
    found = found_by(opening)
    reasons = {
        item.variables["LD_PRELOAD"]: item.problem
        for item in found.tried
        if "LD_PRELOAD" in item.variables
    }
    assert list(reasons) == ["libtcmalloc_minimal.so.4", "libjemalloc.so.2"]
    assert reasons["libtcmalloc_minimal.so.4"].startswith("exit code -6")
    assert reasons["libjemalloc.so.2"] in ("", "no gain beyond noise")
    assert "libtcmalloc_minimal.so.4" not in found.variables.get("LD_PRELOAD", "")


def test_nothing_is_recorded_of_a_disturbed_machine(opening: Opening) -> None:
    found = found_by(opening, replace(POLICY, busy_limit=-1.0))
    assert found.tried
    assert all("rounds were undisturbed" in item.problem for item in found.tried)
    assert not found.variables
    assert found.text == ""


def test_settings_that_cost_too_much_are_not_tried(opening: Opening) -> None:
    for cold_start in (
        replace(STARTED, import_torch_ms=60e3),
        replace(STARTED, second_call_ms=20e3),
        replace(STARTED, memory_peak_mb=2e3),
    ):
        assert settings_gain(opening, cold_start, POLICY) is None
    assert settings_gain(opening, STARTED, replace(POLICY, time_limit_s=0.3)) is None
