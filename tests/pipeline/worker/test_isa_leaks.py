"""A worker whose compiler links instructions that the device class lacks: `failed: isa_leak`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.failures.policy import is_kept
from pipeline.records.outcome import Failure
from tests.steps import HERE, python

BUILD = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from tests.pipeline.worker.test_tasks import entry
from tests.steps import HERE
from pipeline.worker.requests import BuildRequest
from pipeline.worker.tasks import build

if __name__ == "__main__":
    request = BuildRequest(
        key="b", entry=entry(), recipe="inductor-frozen", device_class=HERE, num_threads=2, store=sys.argv[1]
    )
    found = build(request)
    print(json.dumps(asdict(found.failure)))
"""

SMUGGLED = """
#include <immintrin.h>
__m128i smuggled(__m128i a) { return _mm_sha1msg1_epu32(a, a); }
"""


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="smuggles an instruction of x86-64")
def test_foreign_instruction_fails_the_build(tmp_path: Path) -> None:
    real, shim, code = shutil.which("g++"), tmp_path / "bin" / "g++", tmp_path / "smuggled.cpp"
    assert real is not None
    code.write_text(SMUGGLED)
    subprocess.run([real, "-O2", "-fPIC", "-msha", "-c", code, "-o", tmp_path / "smuggled.o"], check=True)
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\ncase " $* " in *" -shared "*) set -- "$@" {tmp_path}/smuggled.o;; esac\nexec {real} "$@"\n')
    shim.chmod(0o755)
    out = python(BUILD, tmp_path / "store", env={**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}"}, timeout_s=500)
    failure = Failure(**json.loads(out.splitlines()[-1]))
    assert (failure.kind, failure.code) == ("isa_leak", "CP-ISA-LEAK"), failure
    assert f"holds instructions outside of {HERE}" in failure.message
    assert "sha_ni: sha1msg1 xmm0,xmm0 in smuggled(long long __vector(2))" in failure.message
    assert is_kept(failure), "the next campaign would only fail again"
