"""Arrays in place of tensors: bfloat16, files, and thread counts as torch has them."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save

from freezer.hardware import default_threads
from freezer.runtime.arrays import BFLOAT16, array_of, narrowed, widened
from freezer.runtime.tensor_files import array_bytes, arrays_in, load_tensors, tensor_bytes
from freezer.runtime.tensors import to_array, to_tensor
from freezer.spec import DTYPES
from tests.support.steps import python


def test_bfloat16_rounds_as_torch_does() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), dtype=torch.int64).to(torch.int32)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 3.4e38])
    for floats in (bits.view(torch.float32), special, torch.tensor(1.1)):
        rounded = narrowed(floats.numpy())
        assert rounded.dtype == BFLOAT16
        expected = floats.bfloat16()
        assert torch.equal(to_tensor(rounded).nan_to_num(), expected.nan_to_num())
        np.testing.assert_array_equal(widened(rounded), expected.float().numpy())


def test_owners_of_bfloat16_are_read() -> None:
    expected = np.array([1.5, -2.0], np.float32)
    for value in (
        torch.from_numpy(expected).bfloat16().requires_grad_(),
        expected.astype(ml_dtypes.bfloat16),
    ):
        array = array_of(value)
        assert array is not None
        np.testing.assert_array_equal(widened(array), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_hold_every_dtype(dtype: str, tmp_path: Path) -> None:
    whole = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(getattr(torch, dtype))
    tensors = {"a": whole, "b": whole.T, "c": whole[:0], "d": whole[0, 1]}
    arrays = {name: to_array(tensor) for name, tensor in tensors.items()}
    (tmp_path / "x.safetensors").write_bytes(array_bytes(arrays))
    stored = load_tensors(tmp_path / "x.safetensors")
    for found in (arrays_in(array_bytes(arrays)), arrays_in(tensor_bytes(tensors))):
        for name, tensor in tensors.items():
            assert torch.equal(stored[name], tensor)
            assert torch.equal(to_tensor(found[name]), tensor)


def test_files_are_those_of_safetensors() -> None:
    tensors = {dtype: torch.ones(3, dtype=getattr(torch, dtype)) for dtype in DTYPES}
    pairs = tensors.pop("complex128")
    tensors |= {"b\u00e9": torch.eye(2), "a": torch.zeros(0, 2), "c": torch.tensor(True)}
    assert tensor_bytes(tensors) == save(tensors)
    tensors["z"] = torch.view_as_real(pairs)
    assert tensor_bytes(tensors | {"z": pairs}) == save(tensors, {"complex128": '["z"]'})
    with pytest.raises(ValueError, match="x has dtype U16"):
        arrays_in(save({"x": torch.ones(2, dtype=torch.uint16)}))


def test_threads_are_torchs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import torch; print(torch.get_num_threads())"
    for value in ("1", "2,1"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert default_threads() == int(python(code))
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert default_threads() == int(python(code))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    for cpu in range(4):
        place = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    assert default_threads(tmp_path) == 2, "physical cores"
    assert default_threads(tmp_path / "nothing") == 4
