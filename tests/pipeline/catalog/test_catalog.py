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
from pipeline.catalog import read_catalog, refuse_bad_entries
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


NO_DIMS = {"inputs": "[{shape: [2, 16]}]", "dims": ""}

BAD: list[tuple[dict[str, str], str, str]] = [
    ({"name": "Good"}, "name", "got 'Good', expected lower-case .*; write 'good'"),
    ({"name": ""}, "name", "the field is required; add it"),
    ({"source": "onnx:x"}, "source", "got 'onnx:x', expected python:…, torchscript:…"),
    (
        {"source": "model.pt"},
        "source",
        "a file needs its kind before it, as in torchscript:model.pt",
    ),
    ({"source": "python:nowhere:good"}, "source", "module 'nowhere' is not found; looked in"),
    (
        {"source": "python:campaign_models:god"},
        "source",
        "has no such function; expected .*; did you mean 'good'\\?",
    ),
    ({"source": "python:bad_syntax:make"}, "source", "bad_syntax.py:2: .*; fix the module"),
    ({"source": "torchscript:none.pt"}, "source", "none.pt does not exist; paths are relative"),
    ({"source": "transformers:./none"}, "source", "none is not a folder; paths are relative to"),
    ({"source": "transformers:here/none"}, "source", "here/none is not a folder"),
    (
        {"source": "torchscript:no_models.py", "args": "{a: 1}"},
        "source",
        "'args' is for python and transformers sources",
    ),
    ({"source": "mlflow:digits"}, "source", "expected mlflow:models:/NAME@ALIAS or"),
    ({"sha256": "abc"}, "sha256", "64 hexadecimal digits in lower case, as sha256sum prints them"),
    ({"seed": "-1"}, "seed", "got '-1', expected a number of at least 0"),
    ({"inputs": "", "dims": ""}, "inputs", "got neither `inputs:` nor `samples:`; write `inputs: "),
    ({"dims": ""}, "inputs", "dim 'batch' is not in dims"),
    (
        {"dims": "{bacth: {max: 8}}"},
        "inputs",
        "did you mean 'bacth'",
    ),
    (
        {"dims": "{batch: {mx: 8}}"},
        "dims.batch",
        "field 'mx' is unknown; expected max, .*; did you mean 'max'",
    ),
    ({"dims": "{batch: {min: 9, max: 8}}"}, "dims.batch", "expected 1 <= min <= max"),
    ({"samples": "none.npz"}, "samples", "none.npz does not exist"),
    ({"samples": "catalog.txt"}, "samples", "expected a file that ends in"),
    (
        {"samples": "other.npz"},
        "samples",
        "got tensors \\['y'\\], expected the inputs \\['input_0'\\]",
    ),
    ({"files": "[none.bin]"}, "files.0", "matches nothing"),
    ({"recipes": "[fast]"}, "recipes.0", "unknown recipe 'fast'"),
    ({"recipes": "[]"}, "recipes", "expected at least one"),
    ({"device_classes": "[cpu-z80]"}, "device_classes.0", "unknown device class 'cpu-z80'"),
    ({"task_metric": "accuracy"}, "task_metric", "expected python:MODULE:FUNCTION"),
    ({"limits": "{speedup_min: -1}"}, "limits.speedup_min", "got '-1', expected a number above 0"),
    (
        {"limits": "{timeout_s: 1000000}"},
        "limits.timeout_s",
        "got '1000000', expected .* above 0 and of at most 604800",
    ),
    (
        {"limits": "{memory_gb: true}"},
        "limits.memory_gb",
        "got 'True', expected a number of at least 0.1",
    ),
    ({"limits": "3"}, "limits", "got '3', expected a mapping"),
    ({"limits": "{speedup_mim: 1}"}, "limits.speedup_mim", "did you mean 'speedup_min'"),
    ({"limits": "{build_s: 60}"}, "limits.build_s", "the limit is unknown"),
    ({"price_per_hour": "{cpu-x86-64-v3: 1}"}, "price_per_hour", "the field is unknown"),
    (
        {"objective": "p96"},
        "objective",
        "got 'p96', expected 'p50', 'p95', 'throughput' or 'size'",
    ),
    ({"weights": "zeros"}, "weights", "got 'zeros', expected 'random'"),
    ({"colour": "blue"}, "colour", "the field is unknown; expected name, args"),
    ({"tags": "{team: 3}"}, "tags.team", "got '3', expected a text"),
    ({"threads": "[]"}, "threads", "expected at least one; remove the field"),
    ({"threads": "[0]"}, "threads.0", "got '0', expected a number of at least 1"),
    ({"threads": "[1, 0]"}, "threads.1", "got '0', expected a number of at least 1"),
    (
        {"threads": "[1, 4, 1]"},
        "threads",
        "got \\[1, 4, 1\\], expected each count once; the first decides",
    ),
    (
        {"points": "[{batch: 1}]", **NO_DIMS},
        "points",
        "'batch' is not a declared dim; expected none",
    ),
    (
        {"points": "[{bach: 1}]"},
        "points",
        "'bach' is not a declared dim; expected batch; did you mean 'batch'",
    ),
    ({"points": "[{batch: 1}, {batch: 9}]"}, "points", "expected batch from 1 to 8"),
    ({"preserve": "[sub.2nd]"}, "preserve.0", "got 'sub.2nd', expected an attribute or method"),
    ({"reset": "sub.reset"}, "reset", "expected the name of a method that takes nothing"),
    ({"trust": "maybe"}, "trust", "got 'maybe', expected true or false"),
]
"""Fields that replace those of a good entry; the field and message of the one error."""

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
    ("fields", "field", "message"),
    BAD,
    ids=[" ".join(f"{k}={v}" for k, v in bad[0].items()) for bad in BAD],
)
def test_bad_field_is_one_error_in_every_format(
    folder: Path, fields: dict[str, str], field: str, message: str
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
        with pytest.raises(CatalogError, match=message):
            raise problem


def test_all_errors_of_an_entry_are_reported(folder: Path) -> None:
    fields = {
        "name": "Good",
        "source": "python:campaign_models:god",
        "input": "{}",
        "recipes": "[fast, portabel]",
        "seed": "-1",
    }
    catalog = read_catalog(
        write(folder, entry(**fields, limits="{speedup_mim: 1, size_mb_max: 0}"))
    )
    found = {str(problem.field): problem for problem in catalog.problems}
    assert set(found) == {
        "name",
        "source",
        "input",
        "recipes.0",
        "recipes.1",
        "seed",
        "limits.speedup_mim",
        "limits.size_mb_max",
    }
    assert found["name"].place == "catalog.yaml:3"
    assert found["source"].place == "catalog.yaml:4"
    assert "did you mean 'inputs'" in str(found["input"])
    assert "did you mean 'portable'" in str(found["recipes.1"])
    with pytest.raises(CatalogError, match="1 bad entry; fix them"):
        refuse_bad_entries(catalog.problems, keep_going=False)


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
        "inputs.1": 8,
        "inputs.2": 9,
        "dims.batch": 11,
        "limits.size_mb_max": 14,
        "recipes.1": 17,
    }
    assert places == {name: f"catalog.yaml:{line}" for name, line in lines.items()}


def test_a_pickle_needs_trust(folder: Path) -> None:
    (problem,) = read_catalog(write(folder, entry(**PICKLE))).problems
    assert problem.code == "CP-TRUST"
    assert "runs code when it is loaded; add `trust: true`" in str(problem)
    (read,) = read_catalog(write(folder, entry(**PICKLE, trust="true"))).entries
    assert read.source.trust


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (
            "",
            "CP-CATALOG-EMPTY",
            "catalog.yaml is empty; expected `models:` with at least one entry",
        ),
        ("# models:\n", "CP-CATALOG-EMPTY", "catalog.yaml is empty"),
        ("models: []\n", "CP-CATALOG-EMPTY", "lists no models"),
        ("models: {a: b}\n", "CP-CATALOG", "got a dict, expected a list of entries"),
        (
            "model: []\n",
            "CP-CATALOG",
            "the field is unknown; expected defaults, models; did you mean 'models'",
        ),
        ("defaults: 3\nmodels: [a]\n", "CP-CATALOG", "got a int, expected a mapping"),
        ("models: [\n", "CP-CATALOG", "is not YAML: .*line 2"),
        (
            "models: !!python/object:os.system {}\n",
            "CP-CATALOG",
            "is not YAML: .*could not determine a constructor",
        ),
        (
            "models:\n  - name: a\n    name: b\n",
            "CP-CATALOG",
            "catalog.yaml:3: 'name' is given twice, first in line 2",
        ),
        (f"models: {'[' * 100_000}\n", "CP-CATALOG", "nested more than 64 deep"),
        (entry(args="&a {width: *a}"), "CP-CATALOG", "catalog.yaml:7: an alias contains itself"),
        (
            entry(inputs="&a {x: {tuple: [*a]}}"),
            "CP-CATALOG",
            "catalog.yaml:5: an alias contains itself",
        ),
    ],
)
def test_invalid_catalog_is_refused(tmp_path: Path, text: str, code: str, message: str) -> None:
    (tmp_path / "catalog.yaml").write_text(text)
    with pytest.raises(CatalogError, match=message) as caught:
        read_catalog(tmp_path / "catalog.yaml")
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("name", "content", "code", "message"),
    [
        (
            "latin.yaml",
            "models: [é]".encode("latin-1"),
            "CP-CATALOG",
            "is not UTF-8 text: .* at byte 9; save it as UTF-8",
        ),
        (
            "catalog.toml",
            b"",
            "CP-CATALOG",
            "got the suffix '.toml', expected .yaml, .yml, .json, .jsonl",
        ),
        (
            "big.yaml",
            b"# " + b"x" * 20_000_000,
            "CP-CATALOG",
            "got 20 MB of YAML, expected at most 17 MB; write it as JSON Lines",
        ),
        ("latin.jsonl", b'{"name": "\xe9"}\n', "CP-CATALOG", "latin.jsonl:1 is not UTF-8 text"),
        (
            "half.jsonl",
            b'{"name": "a"}\n{"name": \n',
            "CP-CATALOG",
            "half.jsonl:2: got .*, which is not JSON: Expecting value",
        ),
        ("twice.jsonl", b'{"name": "a", "name": "b"}\n', "CP-CATALOG", "'name' is given twice"),
        ("deep.jsonl", b"[" * 200_000, "CP-CATALOG", "nested too deep"),
        ("empty.jsonl", b"\n\n", "CP-CATALOG-EMPTY", "lists no models"),
    ],
)
def test_unreadable_file_is_refused(
    tmp_path: Path, name: str, content: bytes, code: str, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CatalogError, match=message) as caught:
        read_catalog(tmp_path / name)
    assert caught.value.code == code


def test_missing_catalog_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CatalogError, match=r"none.yaml cannot be read: it does not exist; name a catalog file"
    ):
        read_catalog(tmp_path / "none.yaml")


PLACES = {
    **{"threads": "[2, 1]", "points": "[{batch: 3}]", "preserve": "[version]", "reset": "clear"},
    "objective": "throughput",
}


def test_all_formats_are_equivalent(folder: Path) -> None:
    path = write(
        folder,
        entry(
            tags="{team: vision}",
            limits="{speedup_min: 1.5}",
            seed="3",
            recipes="[portable]",
            **PLACES,
        ),
    )
    (first,), (second,) = (read_catalog(form).entries for form in (path, as_json_lines(path)))
    assert first == second
    assert (first.tags, first.limits.speedup_min, first.source.seed) == ({"team": "vision"}, 1.5, 3)
    assert (first.threads, first.points) == ((2, 1), ({"batch": 3},))
    assert (first.preserve, first.reset) == (("version",), "clear")
    assert first.objective == "throughput"


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
@pytest.mark.parametrize("form", ["{}", "[{}]", "{{x: {}}}", "[{{shape: {0}, range: {0}}}]"])
def test_odd_values_are_errors_of_their_entry(tmp_path: Path, field: str, form: str) -> None:
    """Each gives an entry with a key, or errors; nothing else is raised."""
    for value in SCALARS:
        path = write(tmp_path, entry(**{field: form.format(value)}))
        with contextlib.suppress(CatalogError):
            for read in read_catalog(path).entries:
                source_key(read, FileDigests(tmp_path / "digests.json"))


def test_half_a_surrogate_pair_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "catalog.jsonl"
    path.write_text('{"name": "a", "tags": {"x": "\\ud800"}}')
    with pytest.raises(CatalogError):
        read_catalog(path)
