"""Compilers that die of precompiled headers, as g++ 12 does with 256-bit SVE, or of everything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freezer.errors import BuildError
from freezer.freezing.lowering import compiler_problem
from freezer.hardware import device_class
from tests.support.models import Mlp, seeded
from tests.support.steps import HERE, candidate_of, random_inputs, subject_of

DIES = """#!/bin/sh
case " $* " in
    *{pattern}*)
        echo "In file included from kernel.cpp:1:" >&2
        echo "/usr/include/vec_float.h:196:61: internal compiler error: Segmentation fault" >&2
        exit 1 ;;
esac
exec g++ "$@"
"""


@pytest.fixture
def compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A g++ that dies when an argument matches a pattern."""
    path = tmp_path / "bin" / "g++"
    path.parent.mkdir()
    path.write_text(DIES.format(pattern=request.param))
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


@pytest.mark.parametrize("compiler", ['" -include "'], indirect=True)
@pytest.mark.usefixtures("compiler")
def test_builds_without_precompiled_headers(tmp_path: Path) -> None:
    x = random_inputs(2, 4)
    subject = subject_of(seeded(Mlp), {"x": x})
    candidate = candidate_of(subject, "inductor-frozen", tmp_path / "built")
    torch.testing.assert_close(candidate.open(subject)(x), seeded(Mlp)(x))
    assert compiler_problem(device_class(HERE), precompiled=False) is None
    problem = compiler_problem(device_class(HERE), precompiled=True)
    assert problem is not None
    assert "vec_float.h:196:61: internal compiler error: Segmentation fault" in problem


@pytest.mark.parametrize("compiler", ['" -c "'], indirect=True)
@pytest.mark.usefixtures("compiler")
def test_a_failed_build_quotes_the_compiler(tmp_path: Path) -> None:
    subject = subject_of(seeded(Mlp), {"x": random_inputs(2, 4)})
    with pytest.raises(BuildError, match=r"vec_float\.h:196:61: internal compiler error"):
        candidate_of(subject, "inductor-frozen", tmp_path / "built")
