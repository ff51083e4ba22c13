"""Full float32 precision while building and judging, regardless of the process's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from freezer.runtime.torch_settings import plain_precision
from tests.support.models import seeded
from tests.support.steps import candidate_of, judgement_of, random_inputs, subject_of

OPERATIONS = ("matmul", "conv", "rnn")


def by_operation() -> None:
    for operation in OPERATIONS:
        getattr(torch.backends.mkldnn, operation).fp32_precision = "bf16"


def for_all() -> None:
    torch._C._set_fp32_precision_setter("mkldnn", "all", "bf16")


def by_the_older_name() -> None:
    torch.set_float32_matmul_precision("medium")


def precisions() -> dict[str, str]:
    return {
        name: torch._C._get_fp32_precision_getter("mkldnn", name) for name in (*OPERATIONS, "all")
    }


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    for name in (*OPERATIONS, "all"):
        torch._C._set_fp32_precision_setter("mkldnn", name, "none")
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("lessened", [by_operation, for_all, by_the_older_name])
def test_a_block_restores_the_processs_precision(lessened: Callable[[], None]) -> None:
    lessened()
    before = precisions()
    assert "bf16" in before.values()
    with plain_precision():
        assert not {"bf16", "tf32"} & {
            value for name, value in precisions().items() if name != "all"
        }
        assert torch.get_float32_matmul_precision() == "highest"
    assert precisions() == before
    torch._C._set_fp32_precision_setter("mkldnn", "all", "none")
    inherited = set() if lessened is for_all else {"bf16"}
    assert set(precisions().values()) - {"none", "ieee"} == inherited


SEEN: list[str] = []


class Looking(nn.Module):
    """Records the precision of products in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(torch._C._get_fp32_precision_getter("mkldnn", "matmul"))
        out: Tensor = self.linear(x)
        return out


def test_eager_is_judged_in_full_precision(tmp_path: Path) -> None:
    """Otherwise eager's error would be large, and hide the candidates' drift."""
    subject = subject_of(seeded(Looking), {"x": random_inputs(2, 4)})
    candidate = candidate_of(subject, "torchscript-frozen", tmp_path / "candidate")
    by_operation()
    SEEN.clear()
    judgement_of(subject, [candidate])
    assert SEEN
    assert set(SEEN) == {"ieee"}
