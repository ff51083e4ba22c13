"""Reading catalogs; every mistake names the entry and the field."""

from __future__ import annotations

import contextlib
import json
import textwrap
from pathlib import Path

import numpy as np
import pytest
import yaml

from freezer.errors import CatalogError
from freezer.spec import ConstantSpec, Dim, TensorSpec
from pipeline.catalog import read_catalog, read_entries
from pipeline.planning import FileDigests, source_key

MODELS = Path(__file__).parents[1] / "models"


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


def test_reads_an_entry_with_all_fields(tmp_path: Path) -> None:
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


def test_threads_and_points_override_the_defaults(tmp_path: Path) -> None:
    text = """
        defaults: {threads: [1, 4], points: [{batch: 1}, {batch: 8}]}
        models:
          - name: both
            source: python:campaign_models:good
            inputs: {x: {shape: [batch, 16]}}
            dims: {batch: {max: 8}}
          - name: own
            source: python:campaign_models:good
            inputs: {x: {shape: [2, 16]}}
            threads: [2]
            points: null
        """
    both, own = read_catalog(write(tmp_path, text)).entries
    assert (both.threads, both.points) == ((1, 4), ({"batch": 1}, {"batch": 8}))
    assert (own.threads, own.points) == ((2,), ())


BAD: list[tuple[dict[str, str], str]] = [
    ({"name": "Good"}, "name"),
    ({"source": "onnx:x"}, "source"),
    ({"source": "python:campaign_models:god"}, "source"),
    ({"source": "python:bad_syntax:make"}, "source"),
    ({"source": "torchscript:none.pt"}, "source"),
    ({"source": "mlflow:digits"}, "source"),
    ({"sha256": "abc"}, "sha256"),
    ({"seed": "-1"}, "seed"),
    ({"inputs": "", "dims": ""}, "inputs"),
    ({"dims": ""}, "inputs"),
    ({"dims": "{batch: {min: 9, max: 8}}"}, "dims.batch"),
    ({"samples": "none.npz"}, "samples"),
    ({"samples": "other.npz"}, "samples"),
    ({"files": "[none.bin]"}, "files.0"),
    ({"recipes": "[fast]"}, "recipes.0"),
    ({"device_classes": "[cpu-z80]"}, "device_classes.0"),
    ({"task_metric": "accuracy"}, "task_metric"),
    ({"limits": "{speedup_min: -1}"}, "limits.speedup_min"),
    ({"limits": "3"}, "limits"),
    ({"limits": "{speedup_mim: 1}"}, "limits.speedup_mim"),
    ({"colour": "blue"}, "colour"),
    ({"tags": "{team: 3}"}, "tags.team"),
    ({"threads": "[1, 4, 1]"}, "threads"),
    ({"points": "[{batch: 1}, {batch: 9}]"}, "points"),
    ({"preserve": "[sub.2nd]"}, "preserve.0"),
    ({"reset": "sub.reset"}, "reset"),
    ({"trust": "maybe"}, "trust"),
]
"""Fields that replace those of a good entry; the field of the one error."""

PICKLE = {"source": "pickle:no_models.py"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what the bad entries name."""
    (tmp_path / "no_models.py").write_text("def needs(width):\n    return width\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "bad_syntax.py").write_text("\ndef make(:\n")
    np.savez(tmp_path / "other.npz", y=np.zeros((2, 16), np.float32))
    return tmp_path


def as_json_lines(path: Path) -> Path:
    """The same catalog as JSON Lines."""
    models = yaml.safe_load(path.read_text())["models"]
    lines = path.with_suffix(".jsonl")
    lines.write_text("".join(json.dumps(model) + "\n" for model in models))
    return lines


@pytest.mark.parametrize(
    ("fields", "field"),
    BAD,
    ids=[" ".join(f"{k}={v}" for k, v in bad[0].items()) for bad in BAD],
)
def test_bad_field_is_one_error_in_every_format(
    folder: Path, fields: dict[str, str], field: str
) -> None:
    path = write(folder, entry(**fields))
    lines = [line.split(":")[0].strip() for line in path.read_text().splitlines()]
    top = field.partition(".")[0]
    for form, place in (
        (path, f"catalog.yaml:{lines.index(top) + 1 if top in lines else 3}"),
        (as_json_lines(path), "catalog.jsonl:1"),
    ):
        catalog = read_catalog(form)
        assert catalog.entries == ()
        (problem,) = catalog.problems
        assert (problem.field, problem.code) == (field, "CP-ENTRY")
        assert problem.entry is not None
        assert str(problem).startswith(f"{place}, entry {problem.entry!r}, field {field!r}: ")


def test_every_error_has_its_own_line(tmp_path: Path) -> None:
    text = """\
        defaults:
          seed: -1
        models:
          - name: good
            source: python:campaign_models:good
            inputs:
              - {shape: [1, 16]}
              - {shap: [1]}
              - {shape: [1], dtype: flot32}
            dims:
              batch: {max: 0}
            limits:
              timeout_s: 60
              size_mb_max: 0
            recipes:
              - portable
              - portabel
        """
    problems = read_catalog(write(tmp_path, text)).problems
    places = {problem.field: problem.place for problem in problems}
    lines = {
        "seed": 2,
        "dims.batch": 11,
        "limits.size_mb_max": 14,
        "recipes.1": 17,
    }
    assert places == {name: f"catalog.yaml:{line}" for name, line in lines.items()}
    (recipe,) = [str(problem) for problem in problems if problem.field == "recipes.1"]
    assert "did you mean 'portable'" in recipe


def test_a_pickle_needs_trust(folder: Path) -> None:
    (problem,) = read_catalog(write(folder, entry(**PICKLE))).problems
    assert problem.code == "CP-TRUST"
    (read,) = read_catalog(write(folder, entry(**PICKLE, trust="true"))).entries
    assert read.source.trust


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("models: []\n", "CP-CATALOG-EMPTY"),
        ("models: {a: b}\n", "CP-CATALOG"),
        ("defaults: 3\nmodels: [a]\n", "CP-CATALOG"),
        ("models: [\n", "CP-CATALOG"),
        ("models: !!python/object:os.system {}\n", "CP-CATALOG"),
        ("models:\n  - name: a\n    name: b\n", "CP-CATALOG"),
        (f"models: {'[' * 100_000}\n", "CP-CATALOG"),
        (entry(args="&a {width: *a}"), "CP-CATALOG"),
    ],
)
def test_invalid_catalog_is_refused(tmp_path: Path, text: str, code: str) -> None:
    (tmp_path / "catalog.yaml").write_text(text)
    with pytest.raises(CatalogError) as caught:
        read_catalog(tmp_path / "catalog.yaml")
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("latin.yaml", "models: [é]".encode("latin-1"), "CP-CATALOG"),
        ("catalog.toml", b"", "CP-CATALOG"),
        ("latin.jsonl", b'{"name": "\xe9"}\n', "CP-CATALOG"),
        ("half.jsonl", b'{"name": "a"}\n{"name": \n', "CP-CATALOG"),
        ("twice.jsonl", b'{"name": "a", "name": "b"}\n', "CP-CATALOG"),
        ("deep.jsonl", b"[" * 200_000, "CP-CATALOG"),
        ("empty.jsonl", b"\n\n", "CP-CATALOG-EMPTY"),
        ("pair.jsonl", b'{"name": "a", "tags": {"x": "\\ud800"}}', "CP-CATALOG"),
    ],
)
def test_unreadable_file_is_refused(tmp_path: Path, name: str, content: bytes, code: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CatalogError) as caught:
        read_catalog(tmp_path / name)
    assert caught.value.code == code


def test_all_formats_are_equivalent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {
        "tags": "{team: vision}",
        "seed": "3",
        "threads": "[2, 1]",
        "points": "[{batch: 3}]",
        "preserve": "[version]",
        "reset": "clear",
        "objective": "throughput",
    }
    path = write(folder, entry(**fields))
    monkeypatch.chdir(folder)
    lines = as_json_lines(path)
    (first,), (second,) = (read_catalog(form).entries for form in (path, lines))
    (third,) = read_entries([json.loads(lines.read_text())]).entries
    assert first == second == third
    assert (first.tags, first.objective, first.source.seed) == ({"team": "vision"}, "throughput", 3)
    assert (first.threads, first.points) == ((2, 1), ({"batch": 3},))
    assert (first.preserve, first.reset) == (("version",), "clear")


def test_good_entries_are_read_beside_bad_ones(tmp_path: Path) -> None:
    text = entry() + entry(name="Bad").removeprefix("models:\n") + entry().removeprefix("models:\n")
    catalog = read_catalog(write(tmp_path, text))
    assert [read.name for read in catalog.entries] == ["good"]
    assert [problem.entry for problem in catalog.problems] == ["Bad", "good"]
    assert "already used at" in str(catalog.problems[1])


def test_only_takes_matching_names(tmp_path: Path) -> None:
    text = "".join(
        entry(name=name).removeprefix("models:\n") for name in ("good", "other", "third")
    )
    catalog = write(tmp_path, f"models:\n{text}")
    assert [read.name for read in read_catalog(catalog, only=["o*", "third"]).entries] == [
        "other",
        "third",
    ]
    with pytest.raises(CatalogError, match="no entry that matches 'z\\*'"):
        read_catalog(catalog, only=["z*"])


LEVELS = range(1, 9)
LAUGHS = {
    "lists": "a0: &a0 [x]\n"
    + "".join(f"      a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in LEVELS),
    "merged": "a0: &a0 {x: 1}\n"
    + "".join(f"      a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in LEVELS),
    "texts": "a0: &a0 " + "x" * 100_000 + "\n      a1: [" + ", ".join(["*a0"] * 1000) + "]\n",
    "sexagesimal": "a0: " + "1:" * 400_000 + "1\n",
    "hexadecimal": "a0: 0x" + "f" * 100_000 + "\n",
}


@pytest.mark.parametrize("args", LAUGHS.values(), ids=LAUGHS)
def test_small_texts_with_huge_values_are_rejected(tmp_path: Path, args: str) -> None:
    """Such catalogs took all memory, or never ended."""
    with pytest.raises(CatalogError) as caught:
        read_catalog(write(tmp_path, entry() + "    args:\n      " + args))
    assert caught.value.code == "CP-CATALOG"


SCALARS = (
    *('!!int ""', "!!int x", "!!int [1]", "!!bool maybe", "!!timestamp x", "2001-99-99"),
    *("!!binary x", '!!float ""', "!!python/name:os.system x", "1e999", "0x" + "f" * 60),
    *("1:1:1", "1:1:1.5", ".nan", "2001-01-01", "!!binary aGVsbG8=", "!!set {a, b}"),
    *("{1: 2, b: 3}", "{[1]: 2}", "{<<: 3}", "{=: 3}", '"\\0"', '"\\ud800"', "x" * 5000),
)
FIELDS = ("args", "name", "source", "inputs", "dims", "samples", "files", "tags", "limits", "seed")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("form", ["{}", "[{{shape: {0}, range: {0}}}]"])
def test_odd_values_are_errors_of_their_entry(tmp_path: Path, field: str, form: str) -> None:
    """Each gives an entry with a key, or errors; nothing else is raised."""
    for value in SCALARS:
        path = write(tmp_path, entry(**{field: form.format(value)}))
        with contextlib.suppress(CatalogError):
            for read in read_catalog(path).entries:
                source_key(read, FileDigests(tmp_path / "digests.json"))


def test_reads_consent_to_lower_precision(tmp_path: Path) -> None:
    arrays = {f"{index}/x": np.zeros((2, 16), np.float32) for index in range(8)}
    labels = {f"{index}/y": np.zeros(2, np.int64) for index in range(8)}
    np.savez(tmp_path / "held_out.npz", **arrays, **labels)  # type: ignore[arg-type]
    text = """
        defaults: {precision: [int8], accuracy: {samples: held_out.npz, labels: y}}
        models:
          - name: good
            source: python:campaign_models:good
            inputs: {x: {shape: [batch, 16]}}
            dims: {batch: {max: 8}}
            accuracy: {metric: "python:campaign_models:good", metric_drop_max: 0.01}
        """
    (read,) = read_catalog(write(tmp_path, text)).entries
    assert read.precision == ("int8",)
    assert read.accuracy is not None
    assert read.accuracy.samples == tmp_path / "held_out.npz"
    assert read.accuracy.metric == "campaign_models:good"
    assert read.accuracy.budget == {"metric_drop_max": 0.01}


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "[int8]"},
        {"precision": "[int4]", "accuracy": "{sqnr_db_min: 20}"},
        {"precision": "[int8]", "accuracy": "{sqnr_db_min: 20}"},
        {"accuracy": "{sqnr_db_min: 20}"},
        {"precision": "[bf16]", "accuracy": "{sqnr_db_min: 20}", "recipes": "[openvino]"},
        {"precision": "[bf16]", "accuracy": "{cosine_min: 0.9, samples: gone.npz}"},
        {"recipes": "[openvino-int8]"},
    ],
)
def test_consent_that_cannot_be_judged_is_refused(tmp_path: Path, fields: dict[str, str]) -> None:
    (problem,) = read_catalog(write(tmp_path, entry(**fields))).problems
    assert problem.code == "CP-ENTRY"
    assert problem.field in ("accuracy", "precision.0")
