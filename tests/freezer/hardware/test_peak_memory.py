"""Peak memory of a block, and weights that are given back."""

from __future__ import annotations

import json

import torch

from freezer.freezing.models import free_tensors
from freezer.runtime.tensors import program_tensors
from tests.support.models import mlp
from tests.support.steps import python

_IN_A_FRESH_PROCESS = """
import json, sys
from pathlib import Path
from freezer.hardware.resources import own_process, peak_bytes, peak_memory

def take(size_mb):
    held = b"x" * size_mb * 1_000_000

own, before_mb, within_mb = json.loads(sys.argv[1])
if own:
    own_process()
take(before_mb)
record = peak_bytes()
with peak_memory() as peak:
    take(within_mb)
print(json.dumps([peak.bytes / 1e6, (peak_bytes() - record) / 1e6]))
"""


def peak_mb(*, own: bool, before_mb: int, within_mb: int) -> tuple[float, float]:
    """The peak of a block in a fresh process, and how far the process's own record of its peak is
    from what it was before it.
    """
    peak, moved = json.loads(python(_IN_A_FRESH_PROCESS, json.dumps([own, before_mb, within_mb])))
    return peak, moved


def test_a_new_peak_of_the_process_is_exact() -> None:
    peak, moved = peak_mb(own=False, before_mb=0, within_mb=200)
    assert 195 <= peak < 210
    assert 195 <= moved < 210


def test_own_processes_reset_their_peak() -> None:
    peak, moved = peak_mb(own=True, before_mb=300, within_mb=100)
    assert 95 <= peak < 110
    assert -205 < moved < -190, "the record is reset"


def test_give_back_keeps_weights_in_use() -> None:
    ours = torch.ones(1000)
    theirs = torch.ones(1000)
    free_tensors([ours, theirs], in_use=[theirs[3:]])
    assert ours.untyped_storage().nbytes() == 0
    assert torch.equal(theirs, torch.ones(1000))


def test_give_back_frees_weights_shared_with_numpy() -> None:
    model = mlp()
    kept = [parameter.detach().numpy() for parameter in model.parameters()]
    free_tensors(program_tensors(model))
    assert kept[0].nbytes
    assert all(parameter.numel() == 0 for parameter in model.parameters())
