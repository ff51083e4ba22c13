"""coldpress diff: recorded outputs, and comparisons of a version's classes with each other and with
the reference.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import freezer
from freezer.artifact import (
    GOLDEN_INPUTS,
    GOLDEN_OUTPUTS,
    OWN_OUTPUTS,
    Artifact,
    file_ref,
)
from freezer.cli.app import main
from freezer.codec import encode
from freezer.compare import OutputError, judge_rmse
from freezer.errors import IntegrityError
from freezer.runtime.tensor_files import (
    OWN_OUTPUT_BYTES,
    load_tensors,
    save_tensors,
    write_own_outputs,
)
from freezer.serving.diff import Difference, DiffRow, Pair, diff
from freezer.serving.diff_text import matrix, problem, sentences
from freezer.spec import OutputSpec
from freezer.store import Store
from tests.conftest import Frozen
from tests.support.steps import HERE, copy_of, flip_a_byte, rewritten

OTHER = "cpu-neoverse-v9"
"""A class for other hardware: diff runs no model."""


def tensors_of(artifact: Artifact, path: str) -> dict[str, Tensor]:
    return load_tensors(artifact.folder / path)


def with_tensors(
    artifact: Artifact, folder: Path, files: Mapping[str, Mapping[str, Tensor]], **changes: Any
) -> Artifact:
    """A copy with other tensor files, and matching digests."""
    copied = copy_of(artifact, folder)
    for path, tensors in files.items():
        (folder / path).unlink()
        save_tensors(tensors, folder / path)
    refs = tuple(file_ref(folder, item.path, item.media_type) for item in copied.manifest.files)
    return rewritten(copied, **{"files": refs, **changes})


def without_outputs(artifact: Artifact, folder: Path, **changes: Any) -> Artifact:
    """A copy without recorded outputs, like artifacts of earlier releases."""
    copied = copy_of(artifact, folder)
    (folder / OWN_OUTPUTS).unlink()
    return rewritten(
        copied,
        files=tuple(item for item in copied.manifest.files if item.path != OWN_OUTPUTS),
        **changes,
    )


def diffed(folder: Path, *artifacts: Artifact) -> Difference:
    """Run diff on a store with these classes; check that every form of the result works."""
    store = Store.open(str(folder / "store"), create=True)
    store.publish("mlp", source_key="key", artifacts=artifacts)
    result = diff("mlp", store=str(store.root))
    assert matrix(result).row_count == len(result.classes)
    json.dumps(encode(result), allow_nan=False)
    assert len(list(sentences(result))) >= len(result.notes)
    assert problem(result)
    return result


def only(found: Difference) -> Pair:
    (pair,) = found.pairs
    return pair


def worst(pair: Pair) -> DiffRow:
    assert pair.worst is not None
    return pair.worst


# Recorded outputs


@pytest.mark.parametrize("which", ["inductor", "scripted", "portable"])
def test_every_artifact_records_its_outputs(which: str, request: pytest.FixtureRequest) -> None:
    artifact = request.getfixturevalue(which).artifact
    inputs, own = tensors_of(artifact, GOLDEN_INPUTS), tensors_of(artifact, OWN_OUTPUTS)
    golden = tensors_of(artifact, GOLDEN_OUTPUTS)
    assert sorted(own) == sorted(golden)
    assert any(not torch.equal(own[name], golden[name]) for name in own)
    model = freezer.load(artifact.folder)
    for index in range(len(artifact.manifest.golden)):
        answer = model(inputs[f"{index}/x"])
        torch.testing.assert_close(own[f"{index}/output"], answer, rtol=1e-6, atol=1e-6)


def test_the_smallest_outputs_are_recorded_within_the_bound(tmp_path: Path) -> None:
    large = torch.zeros(OWN_OUTPUT_BYTES // 12)
    write_own_outputs([{"large": large, "small": torch.ones(1)}] * 3, tmp_path)
    names = "0/large 0/small 1/large 1/small 2/small"
    assert sorted(load_tensors(tmp_path / OWN_OUTPUTS)) == names.split()
    write_own_outputs([{}], tmp_path)
    assert load_tensors(tmp_path / OWN_OUTPUTS) == {}


# Figures


def joined(artifact: Artifact, path: str) -> Tensor:
    """The values of all tensors of a file."""
    tensors = sorted(tensors_of(artifact, path).items())
    return torch.cat([tensor.flatten().double() for _, tensor in tensors])


def test_figures_are_those_of_the_gate(
    published: Store, scripted: Frozen, portable: Frozen
) -> None:
    result = diff("mlp:1", store=str(published.root))
    assert (result.model, result.version, result.classes) == ("mlp", 1, (HERE, "portable"))
    assert [item.point["batch"] for item in result.sets] == [2, 1, 4, 3]
    assert (result.apart, result.not_compared, result.notes) == (False, {}, ())
    one, other = (joined(frozen.artifact, OWN_OUTPUTS) for frozen in (scripted, portable))
    golden = joined(portable.artifact, GOLDEN_OUTPUTS)
    rmse, rms = (float(tensor.square().mean().sqrt()) for tensor in (one - other, golden))
    row = worst(only(result))  # pooled over the sets, as they are small
    bound, ratios = 0.0, []
    for pair, frozen in zip(result.reference, (scripted, portable), strict=True):
        manifest = frozen.artifact.manifest
        error = OutputError(
            rmse=rmse,
            native_rmse=manifest.golden[0].native_rmse["output"],
            rms=rms,
            dtype="float32",
            num_elements=3,
        )
        ratio, allowed = judge_rmse(error, 3.0)
        ratios.append(ratio)
        bound += allowed
        assert pair.other == "reference"
        assert pair.error_ratio == pytest.approx(manifest.drift.error_ratio, rel=0.5)
    assert row.rmse == pytest.approx(rmse)
    assert row.error_ratio == pytest.approx(min(ratios))
    assert row.bound == pytest.approx(bound)


def moved(artifact: Artifact, folder: Path, by: float, **changes: Any) -> Artifact:
    """Another class with slightly larger outputs."""
    own = {}
    for name, tensor in tensors_of(artifact, OWN_OUTPUTS).items():
        own[name] = (tensor.double() + by).float()
    return with_tensors(artifact, folder, {OWN_OUTPUTS: own}, device_class=OTHER, **changes)


@pytest.mark.parametrize(("share", "apart"), [(0.8, False), (1.25, True)])
def test_bounds_of_two_classes_are_summed(
    portable: Frozen, tmp_path: Path, share: float, apart: bool
) -> None:
    same = diffed(
        tmp_path / "same",
        portable.artifact,
        copy_of(portable.artifact, tmp_path / "c", device_class=OTHER),
    )
    bound = worst(only(same)).bound
    assert bound is not None
    assert worst(only(same)).rmse == 0
    found = diffed(
        tmp_path, portable.artifact, moved(portable.artifact, tmp_path / "copy", share * bound)
    )
    assert worst(only(found)).rmse == pytest.approx(share * bound, rel=0.2)
    assert (found.apart, only(found).apart) == (apart, apart)
    if apart:
        assert f"{OTHER} and portable: output 'output', golden set" in problem(found)


def integers(artifact: Artifact, folder: Path, change: int, **changes: Any) -> Artifact:
    """A copy with integer outputs, of which `change` elements per set differ."""
    golden, own = {}, {}
    for name, tensor in tensors_of(artifact, GOLDEN_OUTPUTS).items():
        golden[name] = torch.arange(tensor.numel())
        own[name] = golden[name].clone()
        own[name][:change] += 7
    return with_tensors(
        artifact,
        folder,
        {GOLDEN_OUTPUTS: golden, OWN_OUTPUTS: own},
        outputs=(OutputSpec(name="output", dtype="int64", rank=1),),
        golden=tuple(replace(item, native_rmse={}) for item in artifact.manifest.golden),
        **changes,
    )


@pytest.mark.parametrize("change", [0, 2])
def test_integers_must_be_equal(portable: Frozen, tmp_path: Path, change: int) -> None:
    plain = integers(portable.artifact, tmp_path / "plain", 0)
    other = integers(portable.artifact, tmp_path / "copy", change, device_class=OTHER)
    result = diffed(tmp_path, plain, other)
    assert (result.apart, only(result).error_ratio) == (change > 0, None)
    assert only(result).num_differing == change * len(plain.manifest.golden)


def test_random_models_are_compared_with_their_noise(portable: Frozen, tmp_path: Path) -> None:
    manifest = portable.artifact.manifest
    changes: dict[str, Any] = {
        "golden": tuple(replace(item, native_rmse={"output": 0.1}) for item in manifest.golden),
        "drift": replace(manifest.drift, deterministic=False),
    }
    plain = copy_of(portable.artifact, tmp_path / "plain", **changes)
    found = diffed(tmp_path, plain, moved(portable.artifact, tmp_path / "copy", 0.1, **changes))
    assert not found.apart
    assert only(found).error_ratio == pytest.approx(1.0, rel=1e-3)


# Classes and sets to compare


def test_classes_without_recorded_outputs_are_listed(
    scripted: Frozen, portable: Frozen, tmp_path: Path
) -> None:
    old = without_outputs(portable.artifact, tmp_path / "old", device_class=OTHER)
    found = diffed(tmp_path, scripted.artifact, portable.artifact, old)
    assert (only(found).one, only(found).other) == (HERE, "portable")
    assert list(found.not_compared) == [OTHER]
    found = diffed(tmp_path / "all", old)
    assert (found.classes, found.pairs, found.apart) == ((), (), False)


def test_sets_are_matched_by_their_inputs(
    scripted: Frozen, portable: Frozen, tmp_path: Path
) -> None:
    """The other class was judged with fewer golden sets, in another order."""
    order = [2, 0]
    names = {GOLDEN_INPUTS: "x", GOLDEN_OUTPUTS: "output", OWN_OUTPUTS: "output"}
    files: dict[str, dict[str, Tensor]] = {}
    for path, name in names.items():
        tensors = tensors_of(portable.artifact, path)
        files[path] = {f"0/{name}": tensors[f"2/{name}"], f"1/{name}": tensors[f"0/{name}"]}
    golden = tuple(portable.artifact.manifest.golden[index] for index in order)
    other = with_tensors(portable.artifact, tmp_path / "copy", files, golden=golden)
    found = diffed(tmp_path, scripted.artifact, other)
    assert [len(item.classes) for item in found.sets] == [2, 1, 2, 1]
    assert (only(found).num_compared, only(found).apart) == (2, False)


# The command


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def coldpress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `coldpress diff` in this process; returns exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coldpress", "diff", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capsys.readouterr()
        return int(caught.value.code or 0), printed.out, printed.err

    return run


def test_the_exit_codes_of_the_command(
    coldpress: Command, published: Store, portable: Frozen, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    diffed(tmp_path, portable.artifact, moved(portable.artifact, tmp_path / "copy", 1e-2))
    code, out, err = coldpress("mlp", "--store", store, "--json")
    assert (code, json.loads(out)["apart"], "CP-APART" in err) == (1, True, True)
    assert coldpress(portable.artifact.folder)[0] == 2
    assert coldpress("mlp:9", "--store", published.root)[0] == 1
    assert coldpress("mlp", "--store", tmp_path / "none")[0] == 3


# Files


def blob(store: Store, device_class: str, path: str) -> Path:
    manifest = store.manifest(store.version("mlp"), device_class)
    digest = next(item.digest for item in manifest.contents if item.path == path)
    return store.root / "mlp" / "blobs" / "sha256" / digest.removeprefix("sha256:")


@pytest.mark.parametrize("path", [GOLDEN_OUTPUTS, OWN_OUTPUTS])
def test_damaged_outputs_raise(store: Store, path: str) -> None:
    flip_a_byte(blob(store, HERE, path))
    with pytest.raises(IntegrityError):
        diff("mlp", store=str(store.root))
