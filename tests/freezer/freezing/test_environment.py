"""Environment variables that change a build: refused, cleared, or part of the key."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from freezer.errors import UsageError
from freezer.freezing.environment import CLEARED, REFUSED_VARIABLES, check_environment
from freezer.hardware import device_class
from freezer.runtime.devices import host_fingerprint
from tests.support.steps import HERE, python

V4, GPU, PORTABLE = (
    device_class("cpu-x86-64-v4"),
    device_class("cuda-sm80"),
    device_class("portable"),
)

CHECK = (
    "from freezer.errors import UsageError\nfrom freezer.freezing.target import"
    " target_here\n" + "try:\n    target_here({here!r}, 1)\nexcept UsageError as error:\n   "
    " print(error.coded)\nelse:\n    print('no refusal')\n"
)


def said(**environ: str) -> str:
    """The result of asking a fresh process for a target on this machine."""
    return python(CHECK.format(here=HERE), env={**os.environ, **environ}).splitlines()[-1]


def test_reduced_precision_is_refused_by_name() -> None:
    refused = said(ONEDNN_DEFAULT_FPMATH_MODE="BF16")
    assert refused.startswith("CP-ENVIRONMENT: ONEDNN_DEFAULT_FPMATH_MODE=BF16")
    assert said(ONEDNN_DEFAULT_FPMATH_MODE="STRICT", ONEDNN_VERBOSE="0") == "no refusal"


@pytest.mark.parametrize(
    ("environ", "match"),
    [
        ({"ONEDNN_CPU_ISA_HINTS": "PREFER_YMM"}, "pack weights for other vectors"),
        ({"MKL_CBWR": "COMPATIBLE"}, "expected unset, or auto or off"),
        (
            {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
            r"other instructions than those of cpu-x86-64-v4; expected unset, or AVX512",
        ),
        ({"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, "in fewer bits"),
        ({"TORCH_DISABLE_FUNCTIONALIZATION_META_REFERENCE": "1"}, "strides"),
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
        {name: refused.plain[0].upper() for name, refused in REFUSED_VARIABLES.items()},
        V4.limits,
        {
            "OMP_NUM_THREADS": "3",
            "MKL_NUM_THREADS": "3",
            "TORCHINDUCTOR_FREEZING": "1",
            "TORCH_LOGS": "+inductor",
        },
    ],
)
def test_harmless_variables_are_accepted(environ: Mapping[str, str]) -> None:
    check_environment(V4, environ)


def test_gpu_variables_are_refused_for_gpus_only() -> None:
    with pytest.raises(UsageError, match="every CUDA library multiply float32 in fewer bits"):
        check_environment(GPU, {"NVIDIA_TF32_OVERRIDE": "1"})
    check_environment(GPU, {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"})
    check_environment(
        PORTABLE, {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    )  # set by the limits of another class


SETTINGS = """
import json, sys
import torch, torch._dynamo, torch._functorch.config
import torch.compiler.config, torch.fx.experimental._config
from torch._inductor import config
from freezer.freezing.environment import MODULES, straying, without_environment

def settings():
    every = [(name, sys.modules[name].get_config_copy()) for name in MODULES]
    return {f"{name}.{key}": repr(value) for name, found in every for key, value in found.items()}

torch._dynamo.config.recompile_limit = 77
config.max_fusion_size = 11
before = settings()
with without_environment(), config.patch(straying("torch._inductor.config")):
    inside = settings()
assert settings() == before, "everything is restored"
print(json.dumps({"inside": inside, "outside": before}))
"""

USERS = {
    "TORCHINDUCTOR_FREEZING": "1",
    "TORCHINDUCTOR_CPP_MARCH": "native",
    "TORCHINDUCTOR_SIZE_ASSERTS": "0",
    "TORCHINDUCTOR_DISABLED_PASSES": "remove_noop_ops",  # overrides a program
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",  # the same
    "TORCHINDUCTOR_APPLY_GUMBEL_MAX_TRICK": "0",  # in none of the settings of a recipe
    "TORCHINDUCTOR_PERSISTENT_REDUCTIONS": "0",
    "AOT_INDUCTOR_WEIGHT_USE_CACHING_ALLOCATOR": "1",
    "AOTINDUCTOR_REPRO_LEVEL": "4",
    "TORCH_COMPILE_DEBUG": "1",
    "TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES": "0",
    "FAKE_ALLOW_META": "0",
    "CI": "1",
    "TORCHDYNAMO_NO_DATA_DEPENDENT_GRAPH_BREAK": "1",
    "TORCH_COMPILE_DYNAMIC_SOURCES": "L['x']",
}


def test_environment_changes_no_torch_setting() -> None:
    bare = {name: value for name, value in os.environ.items() if not CLEARED.fullmatch(name)} | {
        "PYTHONHASHSEED": "0"
    }
    plain, users = (
        json.loads(python(SETTINGS, env={**bare, **more}).splitlines()[-1]) for more in ({}, USERS)
    )
    differ = {name for name in plain["outside"] if plain["outside"][name] != users["outside"][name]}
    assert len(differ) >= len(USERS) - 1, "torch reads them"
    assert {
        name: value for name, value in users["inside"].items() if value != plain["inside"][name]
    } == {}
    assert plain["inside"]["torch._dynamo.config.recompile_limit"] == "77", "set by the program"
    assert plain["inside"]["torch._inductor.config.max_fusion_size"] == "64", "the default of torch"


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
    used, version = python(code, env={**os.environ, "CXX": ""}).strip().split(" | ")
    assert used == "g++"
    assert version != "another compiler 1.2.3"


def test_speed_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"OMP_WAIT_POLICY": "passive", "LD_PRELOAD": "x.so", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    for name, value in {**given, "HOME": "/", "TORCH_LOGS": "+all"}.items():
        monkeypatch.setenv(name, value)
    found = host_fingerprint()["environment"]
    assert found.items() >= given.items()
    assert not {"HOME", "TORCH_LOGS"} & found.keys()
