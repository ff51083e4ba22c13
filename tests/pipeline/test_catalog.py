"""Catalogs: what is read, and that every mistake names the entry and the field."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from freezer.errors import CatalogError
from freezer.spec import ConstantSpec, Dim, TensorSpec
from pipeline.catalog import read_catalog

MODELS = Path(__file__).parent / "models"


def write(folder: Path, text: str) -> Path:
    path = folder / "catalog.yaml"
    path.write_text(textwrap.dedent(text))
    (folder / "campaign_models.py").write_text((MODELS / "campaign_models.py").read_text())
    return path


def entry(**fields: str) -> str:
    """A catalog of one good entry, with some fields replaced; an empty value leaves a field out."""
    base = {
        "name": "good",
        "source": "python:campaign_models:good",
        "inputs": "[{shape: [batch, 16]}]",
        "dims": "{batch: {min: 1, max: 8}}",
    }
    lines = [f"    {name}: {value}" for name, value in {**base, **fields}.items() if value]
    return "models:\n  -\n" + "\n".join(lines) + "\n"


def test_reads_an_entry_with_all_it_may_hold(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"1")
    text = """
        defaults: {recipes: [torchscript-frozen], limits: {speedup_min: 1.2, timeout_s: 60}}
        models:
          - name: good
            source: python:campaign_models:good
            args: {width: 32}
            files: ["*.bin"]
            inputs: {x: {shape: [batch, 16], dtype: float16, range: [0, 1]}, sr: {value: 16000}}
            dims: {batch: {max: 8}}
            task_metric: python:campaign_models:good
            limits: {speedup_min: 1.5}
            device_classes: [cpu-x86-64-v3]
        """
    (read,) = read_catalog(write(tmp_path, text)).entries
    assert read.name == "good"
    assert read.source.args == {"width": 32}
    assert read.spec is not None
    assert read.spec.inputs == (
        TensorSpec(name="x", dtype="float16", shape=("batch", 16), range=(0, 1)),
        ConstantSpec(name="sr", value=16000),
    )
    assert read.spec.dims == (Dim(name="batch", min=1, max=8),)
    assert read.spec.style == "keyword"
    assert (read.limits.speedup_min, read.limits.timeout_s) == (1.5, 60)
    assert read.recipes == ("torchscript-frozen",)
    assert read.device_classes == ("cpu-x86-64-v3",)
    assert [path.name for path in read.files] == ["weights.bin"]
    assert read.task_metric == "campaign_models:good"


def test_inputs_in_a_list_are_positional(tmp_path: Path) -> None:
    (read,) = read_catalog(write(tmp_path, entry())).entries
    assert read.spec is not None
    assert read.spec.style == "positional"


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"name": "Good"}, "name", "got 'Good', expected lower-case"),
        ({"name": ""}, "name", "required"),
        ({"name": "3.5"}, "name", "valid string"),
        ({"source": ""}, "source", "required"),
        ({"source": "onnx:x"}, "source", "expected python:"),
        ({"source": "python:campaign_models"}, "source", "expected python:MODULE:FUNCTION"),
        ({"source": "python:nowhere:good"}, "source", "module 'nowhere' is not found; looked in"),
        ({"source": "torchscript:none.pt"}, "source", "none.pt is not there"),
        ({"inputs": "", "dims": ""}, "inputs", "expected `inputs:` or `samples:`"),
        ({"inputs": ""}, "inputs", "expected `inputs:` or `samples:`"),
        ({"inputs": "{x: 3}"}, "inputs", "input 'x': got a int, expected a mapping"),
        ({"inputs": "{x: {dtype: float32}}"}, "inputs", "field 'shape' is required"),
        ({"inputs": "{x: {shape: [batch, 16], dtyp: int64}}"}, "inputs", "field 'dtyp' is unknown"),
        ({"inputs": "{x: {shape: [batch, 16], dtype: f32}}"}, "inputs", "dtype 'f32' is unknown"),
        ({"inputs": "{x: {shape: [batch, -1]}}"}, "inputs", "got size -1"),
        ({"inputs": "{x: {shape: [batch, 1.5]}}"}, "inputs", "expected a list of sizes"),
        ({"inputs": "{x: {shape: [batch, 4], range: [3, 1]}}"}, "inputs", "low <= high"),
        ({"inputs": "{x: {shape: [batch, 4], range: [3]}}"}, "inputs", "expected \\[low, high\\]"),
        ({"inputs": "{x: {shape: [batch, 4]}, y: {value: [1]}}"}, "inputs", "got a value of type list"),
        ({"inputs": "{x: {shape: [rows, 16]}}"}, "inputs", "dim 'rows' is unbound"),
        ({"dims": ""}, "inputs", "dim 'batch' is unbound; add"),
        ({"dims": "{batch: {min: 9, max: 8}}"}, "dims", "expected 1 <= min <= max"),
        ({"dims": "{batch: {min: 0, max: 8}}"}, "dims", "expected 1 <= min <= max"),
        ({"dims": "{batch: {max: many}}"}, "dims", "expected whole numbers"),
        ({"dims": "{batch: {min: 1}}"}, "dims", "field 'max' is required"),
        ({"samples": "none.npz"}, "samples", "none.npz is not there"),
        ({"samples": "catalog.yaml"}, "samples", "expected a file that ends in"),
        ({"files": "[none.bin]"}, "files", "matches nothing"),
        ({"recipes": "[fast]"}, "recipes", "unknown recipe 'fast'"),
        ({"device_classes": "[cpu-z80]"}, "device_classes", "unknown device class 'cpu-z80'"),
        ({"task_metric": "accuracy"}, "task_metric", "expected python:MODULE:FUNCTION"),
        ({"limits": "{speedup_min: -1}"}, "limits.speedup_min", "greater than 0"),
        ({"limits": "{speed: 1}"}, "limits.speed", "unknown"),
        ({"weights": "zeros"}, "weights", "random"),
        ({"colour": "blue"}, "colour", "the field is unknown"),
        ({"preserve": "[version]"}, "preserve", "does not support the field yet"),
        ({"trust": "true"}, "trust", "does not support the field yet"),
    ],
)
def test_a_bad_field_is_one_clear_error(tmp_path: Path, fields: dict[str, str], field: str, message: str) -> None:
    catalog = read_catalog(write(tmp_path, entry(**fields)))
    assert catalog.entries == ()
    (problem,) = catalog.problems
    assert problem.entry is not None
    assert problem.field is not None
    assert problem.field == field
    with pytest.raises(CatalogError, match=message):
        raise problem
    assert problem.entry in str(problem)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping with `models:`"),
        ("- a\n- b\n", "got a list, expected a mapping"),
        ("models: []\n", "lists no models"),
        ("models: {a: b}\n", "lists no models"),
        ("model: []\n", "the field is unknown; expected defaults and models"),
        ("defaults: 3\nmodels: [a]\n", "got a int, expected a mapping"),
        ("models: [\n", "is not YAML"),
        ("models: !!python/object:os.system {}\n", "is not YAML"),
    ],
)
def test_what_is_no_catalog_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        read_catalog(write(tmp_path, text))


def test_a_missing_or_undecodable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="cannot be read: No such file"):
        read_catalog(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes("models: [é]".encode("latin-1"))
    with pytest.raises(CatalogError, match="is not UTF-8 text"):
        read_catalog(tmp_path / "latin.yaml")


def test_good_entries_are_kept_beside_bad_ones(tmp_path: Path) -> None:
    text = entry() + entry(name="Bad").removeprefix("models:\n") + entry().removeprefix("models:\n")
    catalog = read_catalog(write(tmp_path, text))
    assert [read.name for read in catalog.entries] == ["good"]
    assert [problem.entry for problem in catalog.problems] == ["Bad", "good"]
    assert "given twice" in str(catalog.problems[1])


def test_only_takes_matching_names(tmp_path: Path) -> None:
    text = entry() + entry(name="other").removeprefix("models:\n")
    assert [read.name for read in read_catalog(write(tmp_path, text), only="o*").entries] == ["other"]
    with pytest.raises(CatalogError, match="no entry that matches 'z\\*'"):
        read_catalog(write(tmp_path, text), only="z*")
