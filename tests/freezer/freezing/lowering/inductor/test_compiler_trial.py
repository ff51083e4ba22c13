"""Compilers that would die of precompiled headers, as g++ 12 with 256-bit SVE, or of kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from freezer.errors import BuildError
from freezer.freezing.lowering import compiler_problem
from freezer.hardware import device_class
from tests.support.models import mlp
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


def use(pattern: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select a g++ that dies when an argument matches a pattern."""
    compiler = folder / "g++"
    compiler.write_text(DIES.format(pattern=pattern))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


def test_headers_are_not_precompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use('" -include "', tmp_path, monkeypatch)
    assert compiler_problem(device_class(HERE)) is None


def test_a_failed_build_quotes_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use('" -c "', tmp_path, monkeypatch)
    subject = subject_of(mlp(), {"x": random_inputs(2, 4)})
    with pytest.raises(BuildError, match=r"vec_float\.h:196:61: internal compiler error"):
        candidate_of(subject, "inductor-frozen", tmp_path / "built")
