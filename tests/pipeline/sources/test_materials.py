"""Sources of entries: registry models, URLs and local files, and shipping them to workers."""

from __future__ import annotations

import hashlib
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from freezer.errors import SourceError
from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.spec import Dim
from pipeline.catalog import Catalog, read_catalog, read_registry
from pipeline.planning import FileDigests, source_key
from pipeline.sources import Materials
from pipeline.sources.transfer import ship
from pipeline.worker.task_child import load_subject
from tests.support.models import mlp
from tests.support.raylets import ROOT
from tests.support.shown import empty_database
from tests.support.steps import python

ENTRY = (
    "  - {{name: {name}, source: '{source}', inputs: {{x: {{shape: [batch, 4]}}}}, dims: {{batch:"
    " {{max: 4}}}}{more}}}\n"
)


def write(folder: Path, *entries: tuple[str, str, str]) -> Path:
    path = folder / "catalog.yaml"
    path.write_text(
        "models:\n"
        + "".join(
            ENTRY.format(name=name, source=source, more=more) for name, source, more in entries
        )
    )
    return path


def catalog_of(folder: Path, *entries: tuple[str, str, str]) -> Catalog:
    catalog = read_catalog(write(folder, *entries))
    assert catalog.problems == ()
    return catalog


def scripted(path: Path) -> Path:
    with torchscript_deprecations_silenced():
        torch.jit.save(torch.jit.script(mlp()), str(path))
    return path


@pytest.fixture
def digests(tmp_path: Path) -> FileDigests:
    return FileDigests(tmp_path / "digests.json")


@pytest.fixture(scope="module")
def registry(template: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tracking URI of a registry: `exported` as pt2 with an example, `Old One` pickled,
    `frozen` made by us.
    """
    folder = tmp_path_factory.mktemp("registry")
    script = """
import sys, mlflow, numpy as np, torch
from tests.support.models import mlp
from mlflow.models import infer_signature
mlflow.set_tracking_uri(sys.argv[1])
mlflow.create_experiment("sources", artifact_location=sys.argv[2])
mlflow.set_experiment("sources")
x = np.ones((2, 4), np.float32)
signature = infer_signature(x, np.ones((2, 3), np.float32))
for name, form in (("exported", "pt2"), ("Old One", "pickle")):
    with mlflow.start_run():
        logged = mlflow.pytorch.log_model(
            mlp(),
            name="model",
            registered_model_name=name,
            serialization_format=form,
            input_example=x,
            signature=signature,
            pip_requirements=["torch"],
        )
mlflow.register_model(logged.model_uri, "frozen")
client = mlflow.MlflowClient()
client.set_registered_model_alias("exported", "champion", 1)
client.set_model_version_tag("frozen", 1, "coldpress.artifact", "sha256:0")
"""
    uri = empty_database(template, folder / "mlflow")
    environ = {
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    python(script, uri, (folder / "artifacts").as_uri(), env=environ)
    return uri


def test_registry_model_becomes_a_file_with_inputs(
    tmp_path: Path, registry: str, digests: FileDigests
) -> None:
    (tmp_path / "catalog.yaml").write_text(
        "models: [{name: mine, source: 'mlflow:models:/exported@champion'}]\n"
    )
    materials = Materials(tmp_path / "store", registry, digests)
    (entry,), problems = materials.resolve(read_catalog(tmp_path / "catalog.yaml").entries)
    assert not problems
    assert str(entry.source) == "mlflow:models:/exported/1"
    assert entry.registered_name == "mine-frozen"
    assert (entry.tags["coldpress.source_model"], entry.tags["coldpress.source_version"]) == (
        "exported",
        "1",
    )
    assert source_key(entry, digests).parts["version"] == "models:/exported/1"
    with ThreadPoolExecutor(2) as threads:
        ready, again = threads.map(materials.ready, [entry] * 2)
    assert ready == again
    assert list((tmp_path / "store" / ".coldpress" / "staging").iterdir()) == []
    assert (ready.source.kind, str(ready.source)) == ("export", "mlflow:models:/exported/1")
    subject = load_subject(ready)
    x = torch.ones(2, 4)
    assert torch.equal(subject.fresh()(x), mlp()(x))


SECRET = "s3cret"


def test_credentials_of_a_url_are_neither_shown_nor_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts reach the manifest, the ledger, MLflow and reports; the digests the store."""
    monkeypatch.setattr("pipeline.sources.materials.identity", lambda url: "tag")
    monkeypatch.setattr(
        "pipeline.sources.materials.fetch", lambda url, folder, sha256: scripted(tmp_path / "m.pt")
    )
    url = f"https://me:{SECRET}@host/m.pt?sig={SECRET}"
    (entry,) = catalog_of(tmp_path, ("a", f"torchscript:{url}", "")).entries
    assert entry.source.location == url
    digests = FileDigests(tmp_path / "digests.json")
    (resolved,), _ = Materials(tmp_path / "store", "", digests).resolve([entry])
    digests.save()
    assert str(entry.source) == str(resolved.source) == "torchscript:https://host/m.pt"
    assert SECRET not in (tmp_path / "digests.json").read_text()
    for source in (url, f"onnx:{url}", f"pickle:{url}", f"python:{url}"):
        (problem,) = read_catalog(write(tmp_path, ("a", source, ""))).problems
        assert SECRET not in str(problem)


def test_pickled_registry_model_needs_trust(
    tmp_path: Path, registry: str, digests: FileDigests
) -> None:
    (tmp_path / "catalog.yaml").write_text(
        "models:\n  - {name: one, source: 'mlflow:models:/Old One/1'}\n"
        "  - {name: two, source: 'mlflow:models:/Old One', trust: true}\n"
    )
    materials = Materials(tmp_path / "store", registry, digests)
    (one, two), _ = materials.resolve(read_catalog(tmp_path / "catalog.yaml").entries)
    with pytest.raises(SourceError) as caught:
        materials.ready(one)
    assert caught.value.code == "CP-TRUST"
    ready = materials.ready(two)
    assert ready.spec is not None
    assert ready.spec.tensors[0].shape == ("batch", 4)
    assert ready.spec.dims == (Dim(name="batch", min=1, max=8),)
    subject = load_subject(ready)
    assert len(subject.sets) >= 8, "one example is filled up with generated sets"
    assert torch.equal(subject.sets[0].tensors[ready.spec.tensors[0].name], torch.ones(2, 4))


def test_registry_can_be_a_catalog(registry: str) -> None:
    catalog = read_registry("mlflow:", registry, filter_string=None, trust=True, only=())
    assert catalog.problems == ()
    names = {entry.tags["coldpress.source_model"]: entry for entry in catalog.entries}
    assert set(names) == {"exported", "Old One"}, "what Coldpress froze is never a source"
    assert names["exported"].name == "exported"
    assert names["Old One"].name.startswith("old-one-")
    assert names["Old One"].registered_name == "Old One-frozen"
    (champion,) = read_registry(
        "mlflow:@champion", registry, filter_string=None, trust=False, only=()
    ).entries
    assert champion.name == "exported"


def test_unresolvable_source_is_a_problem_of_its_entry(
    tmp_path: Path, registry: str, digests: FileDigests
) -> None:
    scripted(tmp_path / "mlp.jit")
    catalog = catalog_of(
        tmp_path,
        ("gone", "mlflow:models:/none@champion", ""),
        ("frozen", "mlflow:models:/frozen/1", ""),
        ("far", "torchscript:https://127.0.0.1:9/mlp.jit", ""),
        ("pinned", "torchscript:mlp.jit", f", sha256: '{'0' * 64}'"),
        (
            "good",
            "torchscript:mlp.jit",
            f", sha256: '{hashlib.sha256((tmp_path / 'mlp.jit').read_bytes()).hexdigest()}'",
        ),
    )
    entries, problems = Materials(tmp_path / "store", registry, digests).resolve(catalog.entries)
    assert [entry.name for entry in entries] == ["good"]
    assert [(problem.entry, problem.field, problem.code) for problem in problems] == [
        ("gone", "source", "CP-REGISTRY"),
        ("frozen", "source", "CP-REGISTRY"),
        ("far", "source", "CP-FETCH"),
        ("pinned", "source", "CP-FETCH-DIGEST"),
    ]


def test_recreated_registry_changes_keys(tmp_path: Path, digests: FileDigests) -> None:
    (entry,) = catalog_of(tmp_path, ("mine", "mlflow:models:/exported/1", "")).entries
    one, other = (
        source_key(replace(entry, tags={"coldpress.source_run": run}), digests).digest
        for run in ("a", "b")
    )
    assert one != other


# Shipping


FACTORY = """
from pathlib import Path
import torch
import pkg.deep.net as net
def make():
    import late
    size = int((Path(__file__).parent / 'weights.txt').read_text())
    return torch.nn.Linear(net.WIDTH, size)
def metric(predict):
    return 1.0
"""
PROJECT = {
    "ship_factory.py": FACTORY,
    "pkg/__init__.py": "",
    "pkg/base.py": "WIDTH = 4\n",
    "pkg/deep/__init__.py": "from .. import base\n",
    "pkg/deep/net.py": "from ..base import WIDTH\nfrom . import leaf\n",
    "pkg/deep/leaf.py": "",
    "late.py": "",
    "unused.py": "1 / 0\n",
    "weights.txt": "3",
}
"""A factory that imports its neighbours in every way, and reads a file beside them."""
SHIPPED = {
    "python": (
        "python:ship_factory:make",
        ", files: [weights.txt], task_metric: 'python:ship_factory:metric'",
        "Linear",
    ),
    "torchscript": ("torchscript:mlp.jit", "", "RecursiveScriptModule"),
}
"""The source of an entry, its other fields, and the type of its model."""


@pytest.mark.parametrize("kind", SHIPPED)
def test_shipped_entry_loads_without_the_original(tmp_path: Path, kind: str) -> None:
    here = tmp_path / "here"
    for name, text in PROJECT.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    scripted(here / "mlp.jit")
    save_file({"0/x": torch.ones(2, 4)}, here / "samples.safetensors")
    source, more, expected = SHIPPED[kind]
    (entry,) = catalog_of(here, ("mine", source, f"{more}, samples: samples.safetensors")).entries
    shipped = ship(entry, tmp_path / "store" / "sources")
    assert ship(entry, tmp_path / "store" / "sources") == shipped
    shutil.move(here, tmp_path / "gone")
    (tmp_path / "entry.pickle").write_bytes(pickle.dumps(shipped))
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    assert python(LOAD, tmp_path / "entry.pickle", env=environ).split()[-1] == expected


LOAD = """
import pickle, sys
from pathlib import Path
from freezer.runtime.tensor_files import read_samples
from freezer.freezing.sources import find_function
from freezer.freezing.models.loaders import load_source
entry = pickle.loads(Path(sys.argv[1]).read_bytes())
assert len(read_samples(entry.samples)) == 1
if entry.task_metric:
    assert find_function(entry.task_metric, entry.search_path)(None) == 1.0
print(type(load_source(entry.source)).__name__)
"""
"""Loads an entry, and prints the type of its model."""


@pytest.mark.parametrize("same_folder", [True, False])
def test_pickle_is_shipped_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_folder: bool
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "pickled_net.py").write_text("WIDTH = 4\n")
    (tmp_path / "net.pth").write_bytes(b"0")
    if same_folder:
        monkeypatch.chdir(tmp_path)
    (entry,) = catalog_of(tmp_path, ("mine", "pickle:net.pth", ", trust: true")).entries
    entry = replace(
        entry,
        source=replace(
            entry.source, search_path=(str(tmp_path / "code"), *entry.source.search_path)
        ),
    )
    shipped = ship(entry, tmp_path / "store" / "sources")
    assert (Path(shipped.source.search_path[0]) / "pickled_net.py").read_text() == "WIDTH = 4\n"
    assert shipped.source.search_path[0] != str(tmp_path / "code")
