"""The benchmark of kernels, on a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import kernel_times


@pytest.mark.slow
def test_page_has_the_kernels_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog, page = tmp_path / "catalog.yaml", tmp_path / "page.md"
    catalog.write_text("""
models:
  - name: conv
    source: python:tests.support.models:TinyConv
    inputs: {x: {shape: [1, 3, 16, 16]}}
""")
    monkeypatch.setattr(sys, "argv", ["kernel_times", str(catalog), "--out", str(page)])
    kernel_times.main()
    (row,) = [
        line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| conv ")
    ]
    columns = dict(zip(kernel_times.HEAD, row, strict=True))
    assert float(columns["ms"]) > 0
    assert not columns["convolution"].endswith("(0)")
