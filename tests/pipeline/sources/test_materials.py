"""Sources of entries: registry models, URLs and local files, and shipping them to workers."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.spec import Dim
from pipeline.catalog import Catalog, Entry, read_catalog, read_registry
from pipeline.planning import FileDigests, source_key
from pipeline.sources import Materials
from pipeline.sources.transfer import ship
from pipeline.worker.task_child import load_subject
from tests.support.models import mlp
from tests.support.shown import empty_database

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
    root = Path(__file__).parents[3]
    environ = {
        "PYTHONPATH": str(root),
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, uri, (folder / "artifacts").as_uri()],
        check=True,
        capture_output=True,
        cwd=folder,
        env=environ,
    )
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
    ready = materials.ready(entry)
    assert ready.source.kind == "export"
    assert str(ready.source) == "mlflow:models:/exported/1", "provenance says what was asked for"
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


def test_version_is_fetched_by_two_campaigns_at_once(
    tmp_path: Path, registry: str, digests: FileDigests
) -> None:
    (tmp_path / "catalog.yaml").write_text(
        "models: [{name: mine, source: 'mlflow:models:/exported/1'}]\n"
    )
    campaigns = [Materials(tmp_path / "store", registry, digests) for _ in range(2)]
    (entry,), _ = campaigns[0].resolve(read_catalog(tmp_path / "catalog.yaml").entries)
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(lambda materials: materials.ready(entry), campaigns)
    assert one == two
    assert Path(one.source.location).is_file()
    assert list((tmp_path / "store" / ".coldpress" / "staging").iterdir()) == []


def test_pickled_registry_model_needs_trust(
    tmp_path: Path, registry: str, digests: FileDigests
) -> None:
    (tmp_path / "catalog.yaml").write_text(
        "models:\n  - {name: one, source: 'mlflow:models:/Old One/1'}\n"
        "  - {name: two, source: 'mlflow:models:/Old One', trust: true}\n"
    )
    materials = Materials(tmp_path / "store", registry, digests)
    (one, two), _ = materials.resolve(read_catalog(tmp_path / "catalog.yaml").entries)
    with pytest.raises(
        Exception, match=r"is a pickled module, which runs code .* add `trust: true`"
    ) as caught:
        materials.ready(one)
    assert getattr(caught.value, "code", None) == "CP-TRUST"
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


def project(folder: Path) -> Path:
    """A catalog whose factory imports its neighbours in every way, and reads a file beside them."""
    (folder / "pkg" / "deep").mkdir(parents=True)
    (folder / "pkg" / "__init__.py").write_text("")
    (folder / "pkg" / "deep" / "__init__.py").write_text("from .. import base\n")
    (folder / "pkg" / "base.py").write_text("WIDTH = 4\n")
    (folder / "pkg" / "deep" / "net.py").write_text(
        "import torch\nfrom ..base import WIDTH\nfrom . import leaf\n"
    )
    (folder / "pkg" / "deep" / "leaf.py").write_text("HIDDEN = 8\n")
    (folder / "unused.py").write_text("1 / 0\n")
    (folder / "late.py").write_text("SEED = 0\n")
    (folder / "weights.txt").write_text("3")
    (folder / "ship_factory.py").write_text(
        "from pathlib import Path\nimport pkg.deep.net as net\ndef make():\n    import late\n   "
        " import torch\n    torch.manual_seed(late.SEED)\n    return torch.nn.Linear(net.WIDTH,"
        " int((Path(__file__).parent / 'weights.txt').read_text()))\ndef metric(predict):\n   "
        " return 1.0\n"
    )
    return folder


@pytest.mark.parametrize(
    "kind", ["python", "torchscript", pytest.param("transformers", marks=pytest.mark.slow)]
)
def test_shipped_entry_loads_without_the_original(tmp_path: Path, kind: str) -> None:
    here = tmp_path / "here"
    here.mkdir()
    project(here)
    scripted(here / "mlp.jit")
    save_file({"0/x": torch.ones(2, 4)}, here / "samples.safetensors")
    source, more = {
        "python": (
            "python:ship_factory:make",
            ", files: [weights.txt], task_metric: 'python:ship_factory:metric'",
        ),
        "torchscript": ("torchscript:mlp.jit", ""),
        "transformers": ("transformers:bert", ""),
    }[kind]
    if kind == "transformers":
        source = bert(here)
        more = ""
    (entry,) = catalog_of(here, ("mine", source, f"{more}, samples: samples.safetensors")).entries
    shipped = ship(entry, tmp_path / "store" / "sources")
    again = ship(entry, tmp_path / "store" / "sources")
    assert shipped == again
    shutil.move(here, tmp_path / "gone")
    loaded = elsewhere(shipped, tmp_path)
    assert (
        loaded
        == {
            "python": "Linear",
            "torchscript": "RecursiveScriptModule",
            "transformers": "BertModel",
        }[kind]
    )


def bert(folder: Path) -> str:
    from transformers import BertConfig, BertModel

    tiny = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=30,
        max_position_embeddings=16,
    )
    BertModel(tiny).save_pretrained(folder / "bert")
    return "transformers:bert"


def elsewhere(entry: Entry, folder: Path) -> str:
    """The type of the entry's model, as another process loads it."""
    import pickle

    (folder / "entry.pickle").write_bytes(pickle.dumps(entry))
    script = """
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
    environ = {"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(folder / "entry.pickle")],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


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
