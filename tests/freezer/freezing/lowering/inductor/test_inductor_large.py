"""A model of 2 GB: it builds, and loading takes little more memory than its payload."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import torch

from freezer.freezing.candidates import build
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import target_here
from freezer.hardware import peak_memory
from tests.support.models import seeded
from tests.support.models_inductor import Wide
from tests.support.steps import HERE, python, random_inputs, subject_of

WIDTH, LAYERS = 8192, 8
NEEDED_BYTES = 8_000_000_000

_LOAD = """
import json, sys
from pathlib import Path
import torch
from freezer.runtime.loaders.inductor import open_inductor
from freezer.hardware.resources import peak_bytes, peak_memory

x = torch.randn(1, {width}, generator=torch.Generator().manual_seed(0))
with peak_memory() as opening:
    run = open_inductor(Path(sys.argv[1]), {{}})
with peak_memory() as calling:
    (output,) = run(x)
torch.save(output, sys.argv[2])
print(json.dumps([opening.bytes, calling.bytes, peak_bytes()]))
"""


@pytest.mark.slow
def test_large_model_loads_within_its_size(tmp_path: Path) -> None:
    available = psutil.virtual_memory().available
    if available < NEEDED_BYTES:
        pytest.skip(f"needs 8 GB of memory; this machine has {available / 1e9:.1f} GB available")
    model = seeded(Wide, WIDTH, LAYERS)
    x = random_inputs(1, WIDTH)
    with torch.no_grad():
        expected = model(x)
    weights_bytes = 4 * LAYERS * (WIDTH + 1) * WIDTH
    assert weights_bytes > 2**31
    folder = tmp_path / "candidate"
    folder.mkdir()
    subject = subject_of(model, {"x": x})
    with peak_memory() as peak:
        candidate = build(
            subject,
            RECIPES["inductor-frozen"],
            target_here(HERE, torch.get_num_threads()),
            folder,
            discard=True,
        )
    assert peak.bytes is not None
    assert peak.bytes < 2.5 * weights_bytes, (
        "of the copies that capturing makes, and of those that lowering does"
    )
    path = folder / candidate.payloads[0].path
    printed = python(_LOAD.format(width=WIDTH), path, tmp_path / "output.pt")
    opening, calling, whole = json.loads(printed.splitlines()[-1])
    payload_bytes = path.stat().st_size
    assert opening < 0.01 * payload_bytes, "it is mapped, and nothing is read"
    assert calling < 1.1 * payload_bytes, "pages of the file, and what one call holds"
    assert whole < 1.3 * payload_bytes, "all that the process ever held, torch itself among it"
    torch.testing.assert_close(torch.load(tmp_path / "output.pt"), expected)
