"""Inductor payloads called with arrays: answers, contract and faults, without torch imported."""

from __future__ import annotations

import io
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import freezer
from freezer.artifact import Artifact
from freezer.errors import ContractError, IncompatibleError, MissingDependencyError
from freezer.files import digest_file
from freezer.runtime.native import ArrayModel, libtorch, torch_version
from freezer.runtime.native.torch_library import Libtorch
from tests.conftest import Frozen
from tests.support.steps import (
    copy_of,
    flip_a_byte,
    python,
    random_inputs,
    rewritten,
)

ALONE = """
import sys, numpy as np, freezer
folder, x, out = sys.argv[1:]
model = freezer.load(folder, arrays="numpy")
np.save(out, model(x=np.load(x)))
print(sorted({"torch", "pyarrow", "typer", "rich", "safetensors.torch"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def native(inductor: Frozen) -> ArrayModel:
    model = freezer.load(inductor.artifact.folder, arrays="numpy")
    assert isinstance(model, ArrayModel)
    return model


def x_of(batch: int) -> np.ndarray:
    array: np.ndarray = random_inputs(batch, 3, 16, 16).numpy()
    return array


def test_answers_without_importing_torch(inductor: Frozen, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", x_of(2))
    found = python(ALONE, inductor.artifact.folder, tmp_path / "x.npy", tmp_path / "y.npy")
    assert found.strip() == "[]"
    expected = inductor.model(torch.from_numpy(x_of(2))).detach().numpy()
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=1e-4, atol=1e-5)


def test_takes_any_strides(native: ArrayModel) -> None:
    x = x_of(2)
    expected = native(x)
    assert expected.flags.owndata
    assert expected.flags.c_contiguous
    read_only = x.copy()
    read_only.flags.writeable = False
    odd = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape)
    assert not odd.flags.aligned
    for given in (np.asfortranarray(x), np.repeat(x, 2, axis=3)[..., ::2], read_only, odd):
        np.testing.assert_array_equal(native(x=given), expected)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (x_of(2).astype(np.float64), "got dtype float64, expected float32"),
        (x_of(2).astype(">f4"), ">f4"),
        (x_of(5), "batch from 1 to 4"),
        (x_of(2).tolist(), "got list, expected an array or tensor"),
        (None, "got nothing"),
        (torch.ones(2, 3, 16, 16, device="meta"), "got Tensor that is not an array"),
        (torch.ones(2, 3, 16, 16).to_sparse(), "got Tensor that is not an array"),
    ],
)
def test_wrong_inputs_are_refused(native: ArrayModel, given: object, problem: str) -> None:
    with pytest.raises(ContractError, match=problem):
        native(given)


def test_many_threads_may_call(native: ArrayModel) -> None:
    given = [x_of(1 + index % 4) + index for index in range(64)]
    expected = [native(x) for x in given]
    before = torch.get_num_threads()
    with ThreadPoolExecutor(16) as pool:
        for found, wanted in zip(pool.map(native, given), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
    assert torch.get_num_threads() == before


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def test_calls_leak_nothing(native: ArrayModel) -> None:
    x = x_of(4)
    for _ in range(50):
        native(x)
    before = resident_mb()
    for _ in range(200):
        native(x)
    assert resident_mb() < before + 1, "200 calls, with 12 KB of inputs each"


def test_calls_run_with_the_payloads_threads(inductor: Frozen) -> None:
    counts = [
        payload.num_threads
        for payload in inductor.artifact.manifest.payloads
        if payload.kind == "inductor"
    ]
    more = (counts[0] or 1) + 1
    libtorch().num_threads = more
    try:
        freezer.load(inductor.artifact.folder, arrays="numpy", threads=counts[0])(x_of(1))
        assert libtorch().num_threads == more == torch.get_num_threads()
    finally:
        libtorch().num_threads = counts[0] or 1


def refusal(folder: Path, **options: object) -> freezer.IncompatibleError:
    with pytest.raises(IncompatibleError) as caught:
        freezer.load(folder, arrays="numpy", **options)  # type: ignore[call-overload]
    return caught.value


def damaged(artifact: Artifact, folder: Path, content: bytes) -> Path:
    """A copy whose payloads have other bytes, with matching digests."""
    copied = copy_of(artifact, folder)
    payloads = []
    for payload in copied.manifest.payloads:
        path = folder / payload.path
        path.chmod(0o644)
        path.write_bytes(content)
        payloads.append(replace(payload, digest=digest_file(path), size_bytes=len(content)))
    rewritten(copied, payloads=tuple(payloads))
    return folder


def test_damaged_payloads_are_refused(inductor: Frozen, tmp_path: Path) -> None:
    flipped = copy_of(inductor.artifact, tmp_path / "flipped")
    for payload in flipped.manifest.payloads:
        flip_a_byte(flipped.folder / payload.path)
    assert refusal(flipped.folder).ladder[0].reason == "tampered"
    contents = {"text": b"no archive"}
    for name in ("all/other", "all/data/aotinductor/model/a.wrapper.so"):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(name, b"\x7fELF")
        contents[name[-5:]] = file.getvalue()
    reasons = []
    for name, content in contents.items():
        folder = damaged(inductor.artifact, tmp_path / name, content)
        reasons.append(refusal(folder).ladder[0].reason)
    assert reasons == ["does_not_open", "tampered", "does_not_open"]


def test_missing_libraries_are_reported(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match=r"libtorch_cpu\.so.*install torch again"):
        Libtorch(tmp_path)
    assert torch_version() == torch.__version__
