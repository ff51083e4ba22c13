"""Environment variables that change a build: refused, cleared, or part of the key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from freezer.errors import UsageError
from freezer.freezing.environment import REFUSED_VARIABLES, check_environment
from freezer.freezing.target import target_here
from freezer.hardware import device_class
from freezer.runtime.devices import host_fingerprint
from tests.support.steps import HERE, python

V4, GPU, PORTABLE = (
    device_class("cpu-x86-64-v4"),
    device_class("cuda-sm80"),
    device_class("portable"),
)


@pytest.mark.parametrize(
    ("environ", "match"),
    [
        ({"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}, "^ONEDNN_DEFAULT_FPMATH_MODE=BF16"),
        ({"ONEDNN_CPU_ISA_HINTS": "PREFER_YMM"}, "pack weights for other vectors"),
        ({"MKL_CBWR": "COMPATIBLE"}, "expected unset, or auto or off"),
        (
            {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
            r"other instructions than the device class.s; expected unset, or AVX512",
        ),
        ({"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, "in fewer bits"),
        ({"TORCHINDUCTOR_FREEZING": "0"}, "compiles a model; expected unset"),
        ({"TORCH_COMPILE_DISABLE": "1"}, "how torch captures"),
    ],
)
def test_changed_numbers_or_packing_are_refused(environ: Mapping[str, str], match: str) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        check_environment(V4, environ)
    assert caught.value.code == "CP-ENVIRONMENT"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        dict.fromkeys(REFUSED_VARIABLES, ""),
        {
            name: refused.plain[0].upper()
            for name, refused in REFUSED_VARIABLES.items()
            if refused.plain
        },
        V4.limits,
        {"OMP_NUM_THREADS": "3", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    ],
)
def test_harmless_variables_are_accepted(environ: Mapping[str, str]) -> None:
    check_environment(V4, environ)


def test_targets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    with pytest.raises(UsageError, match="FPMATH"):
        target_here(HERE, 1)


def test_gpu_variables_are_refused_for_gpus_only() -> None:
    with pytest.raises(UsageError, match="every CUDA library multiply float32 in fewer bits"):
        check_environment(GPU, {"NVIDIA_TF32_OVERRIDE": "1"})
    check_environment(GPU, {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"})
    check_environment(
        PORTABLE, {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    )  # set by the limits of another class


INCLUDE = """
import subprocess, sys
from freezer.freezing.environment import cleared
def works(*command):
    code = b"#include <only_on_the_path.h>"
    return subprocess.run(command, input=code, capture_output=True).returncode == 0
compile = ("g++", "-fsyntax-only", "-x", "c++", "-")
print(works(*compile))
with cleared():
    print(works(*compile))
print(works(*compile))
"""


def test_compilers_ignore_include_paths(tmp_path: Path) -> None:
    (tmp_path / "only_on_the_path.h").write_text("")
    assert python(INCLUDE, env={**os.environ, "CPATH": str(tmp_path)}).split() == [
        "True",
        "False",
        "True",
    ]


COMPILER = """
from freezer.freezing.lowering.inductor.compilation import configuration
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import target_here, toolchain
settings = RECIPES["inductor-frozen"].settings["inductor"]
found = configuration(settings, target_here({here!r}, 1), beside=False)
print(found["cpp.cxx"][1], "|", toolchain()["cxx"])
"""


def test_cxx_selects_the_compiler_and_its_version(tmp_path: Path) -> None:
    other = tmp_path / "another-g++"
    other.write_text("#!/bin/sh\necho another compiler 1.2.3\n")
    other.chmod(0o755)
    code = COMPILER.format(here=HERE)
    used, version = python(code, env={**os.environ, "CXX": str(other)}).strip().split(" | ")
    assert (used, version) == (str(other), "another compiler 1.2.3")


def test_speed_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"OMP_WAIT_POLICY": "passive", "LD_PRELOAD": "x.so", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    for name, value in {**given, "HOME": "/", "TORCH_LOGS": "+all"}.items():
        monkeypatch.setenv(name, value)
    found = host_fingerprint()["environment"]
    assert found.items() >= given.items()
    assert not {"HOME", "TORCH_LOGS"} & found.keys()
