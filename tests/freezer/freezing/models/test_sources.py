"""Sources: python factories, TorchScript files, transformers classes and folders; digests of
weights.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import IntegrityError, SourceError
from freezer.freezing.models import load_source, own_spec, weights_digest
from freezer.freezing.sources import parse_source
from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.runtime.loaders.exported import open_exported
from tests.support.models import Calling, Counter, mlp, seeded
from tests.support.steps import random_inputs

X = random_inputs(2, 4)

TINY_BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 30,
    "max_position_embeddings": 16,
}


def load(text: str, folder: Path = Path(), **settings: Any) -> nn.Module:
    return load_source(parse_source(text, folder=folder, **settings))


def test_seed_sets_a_factorys_random_weights(tmp_path: Path) -> None:
    (tmp_path / "seeded_module.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Linear(2, 2)\n"
    )
    one, same, other = (
        weights_digest(load("python:seeded_module:make", seed=seed, search_path=(str(tmp_path),)))
        for seed in (0, 0, 1)
    )
    assert one == same != other


def test_torchscript_path_is_relative_to_the_folder(tmp_path: Path) -> None:
    with torchscript_deprecations_silenced():
        torch.jit.save(torch.jit.script(mlp().train()), str(tmp_path / "mlp.jit"))
    model = load("torchscript:mlp.jit", tmp_path)
    assert not model.training
    assert torch.equal(model(X), mlp()(X))


def test_transformers_folder_keeps_its_class(tmp_path: Path) -> None:
    saved = load("transformers:BertForSequenceClassification", args=TINY_BERT, weights="random")
    saved.save_pretrained(tmp_path / "bert")  # type: ignore[operator]
    source = parse_source("transformers:bert", folder=tmp_path)
    assert source.location == str(tmp_path / "bert")
    loaded = load_source(source)
    assert type(loaded) is type(saved)
    assert weights_digest(loaded) == weights_digest(saved)


@pytest.mark.parametrize(
    "text",
    [
        "resnet50",
        "onnx:model.onnx",
        "model.pt",
        "https://host/model.pt2",
        "pickle:model.pt",
        "python:module",
        "torchscript:none.jit",
    ],
)
def test_parse_source_rejects_bad_sources(tmp_path: Path, text: str) -> None:
    with pytest.raises(SourceError):
        parse_source(text, folder=tmp_path)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("python:tests.support.models:none", {}),
        ("python:tests.no_such:mlp", {}),
        ("python:tests.support.models:no_model", {}),
        ("python:tests.support.models:broken", {}),
        ("python:tests.support.models:mlp", {"args": {"width": 1}}),
        ("transformers:NoSuchConfig", {"weights": "random"}),
        ("torchscript:bad.jit", {}),
    ],
)
def test_load_source_explains_failures(tmp_path: Path, text: str, settings: Any) -> None:
    (tmp_path / "bad.jit").write_bytes(b"no zip")
    with pytest.raises(SourceError) as caught:
        load(text, tmp_path, **settings)
    assert caught.value.code == "CP-SOURCE"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
def test_optimized_torchscript_names_its_cause(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    with torchscript_deprecations_silenced():
        traced = torch.jit.trace(model, random_inputs(2, 3, 8, 8))
        torch.jit.save(torch.jit.optimize_for_inference(traced), tmp_path / "optimized.jit")
    with pytest.raises(SourceError, match="optimize_for_inference"):
        load("torchscript:optimized.jit", tmp_path)


def test_digest_covers_parameters_and_buffers() -> None:
    models = (mlp(), mlp(9), mlp().double(), mlp().half())
    assert len({weights_digest(model) for model in models}) == 4
    assert weights_digest(mlp()) == weights_digest(mlp())
    counter = seeded(Counter)
    before = weights_digest(counter)
    counter(X)
    assert weights_digest(counter) != before


class Two(nn.Module):
    """A model with nested inputs and a constant."""

    def forward(
        self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0
    ) -> torch.Tensor:
        out: torch.Tensor = x * scale + state[0] + state[1]
        return out


def exported(path: Path) -> Path:
    """A program of Two for batches of 2 to 16."""
    batch = torch.export.Dim("batch", min=2, max=16)
    x = torch.ones(3, 4)
    shapes = {"x": {0: batch}, "state": ({0: batch}, {0: batch}), "scale": None}
    program = torch.export.export(Two(), (x, (x, x)), {"scale": 2.0}, dynamic_shapes=shapes)
    torch.export.save(program, str(path))
    return path


def test_exported_program_has_its_own_spec(tmp_path: Path) -> None:
    exported(tmp_path / "two.pt2")
    model = load("export:two.pt2", tmp_path)
    x = torch.ones(5, 4)
    assert torch.equal(model(x, (x, x), scale=2.0), x * 4)
    spec = own_spec(model)
    assert spec is not None
    assert [(item.name, item.shape) for item in spec.tensors] == [
        ("x", ("batch", 4)),
        *((f"state.{i}", ("batch", 4)) for i in (0, 1)),
    ]
    assert [(dim.name, dim.min, dim.max) for dim in spec.dims] == [("batch", 2, 16)]
    assert spec.constants == {"scale": 2.0}
    assert own_spec(mlp()) is None


@pytest.mark.parametrize("dim", [torch.export.Dim.AUTO, torch.export.Dim.DYNAMIC])
def test_unbounded_batches_of_programs_begin_at_one(tmp_path: Path, dim: Any) -> None:
    """Such programs say 2 to infinity, which torch does not check below 3."""
    program = torch.export.export(mlp(), (X,), dynamic_shapes=({0: dim},))
    torch.export.save(program, str(tmp_path / "mlp.pt2"))
    model = load("export:mlp.pt2", tmp_path)
    spec = own_spec(model)
    assert spec is not None
    assert spec.first_point() == {"batch": 1}
    assert torch.equal(model(X[:1]), mlp()(X[:1]))


def test_method_selects_a_program(tmp_path: Path) -> None:
    from torch.export.pt2_archive._package import package_pt2

    programs = {
        name: torch.export.export(mlp(hidden), (X,))
        for name, hidden in (("forward", 8), ("encode", 5))
    }
    package_pt2(str(tmp_path / "both.pt2"), exported_programs=programs)
    assert torch.equal(load("export:both.pt2", tmp_path, method="encode")(X), mlp(5)(X))
    assert torch.equal(load("export:both.pt2", tmp_path)(X), mlp()(X))
    with pytest.raises(SourceError) as caught:
        load("export:both.pt2", tmp_path, method="decode")
    assert caught.value.code == "CP-SOURCE"
    with torchscript_deprecations_silenced():
        torch.jit.save(torch.jit.script(mlp()), str(tmp_path / "mlp.jit"))
    with pytest.raises(SourceError) as caught:
        load("torchscript:mlp.jit", tmp_path, method="encode")
    assert caught.value.code == "CP-SOURCE"


class Surprise:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("surprise"),))


CALL = "__import__('os').system('touch surprise')"


def pickled_inputs(name: str, content: bytes) -> bytes:
    if "sample_inputs" not in name:
        return content
    file = io.BytesIO()
    torch.save(Surprise(), file)
    return file.getvalue()


def called_in_size(name: str, content: bytes) -> bytes:
    return re.sub(
        rb'"expr_str": "([^"]*)"',
        lambda found: f'"expr_str": "{CALL} or '.encode() + found[1] + b'"',
        content,
    )


def called_in_guard(name: str, content: bytes) -> bytes:
    if not name.endswith("models/model.json"):
        return content
    return json.dumps(json.loads(content) | {"guards_code": [f"{CALL} == 0"]}).encode()


def dynamic(path: Path) -> None:
    """An archive of a program with a dynamic size and a size computed from it."""

    def forward(x: Tensor) -> Tensor:
        return x.flatten() * (x.shape[0] // 2) + x.shape[0] * 2.5

    program = torch.export.export(
        Calling(forward),
        (torch.ones(4, 3),),
        dynamic_shapes={"x": {0: torch.export.Dim("n", min=2, max=8)}},
    )
    torch.export.save(program, path)


@pytest.mark.parametrize("attack", [pickled_inputs, called_in_size, called_in_guard])
def test_load_without_trust_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Callable[[str, bytes], bytes]
) -> None:
    """torch runs all three: see the last lines."""
    monkeypatch.chdir(tmp_path)
    dynamic(tmp_path / "good.pt2")
    assert load("export:good.pt2", tmp_path)(torch.ones(6, 3)).shape == (18,)
    with zipfile.ZipFile("good.pt2") as good, zipfile.ZipFile("bad.pt2", "w") as bad:
        for name in good.namelist():
            bad.writestr(name, attack(name, good.read(name)))
    with pytest.raises(SourceError) as caught:
        load("export:bad.pt2", tmp_path)
    assert caught.value.code == "CP-TRUST"
    with pytest.raises(IntegrityError):
        open_exported(tmp_path / "bad.pt2", {})
    assert not (tmp_path / "surprise").exists()
    with suppress(Exception):
        torch.export.load("bad.pt2").module()(torch.ones(4, 3))
    assert (tmp_path / "surprise").exists()


def test_compiled_code_needs_trust(tmp_path: Path) -> None:
    exported(tmp_path / "two.pt2")
    with zipfile.ZipFile(tmp_path / "two.pt2", "a") as archive:
        archive.writestr("two/data/aotinductor/model/model.so", b"")
    with pytest.raises(SourceError, match="which torch would run"):
        load("export:two.pt2", tmp_path)
    (tmp_path / "no.pt2").write_bytes(b"no zip")
    with pytest.raises(SourceError):
        load("export:no.pt2", tmp_path)


def test_pickled_module_needs_trust(tmp_path: Path) -> None:
    torch.save(mlp(), tmp_path / "mlp.pth")
    assert torch.equal(load("pickle:mlp.pth", tmp_path, trust=True)(X), mlp()(X))
    torch.save(mlp().state_dict(), tmp_path / "weights.pth")
    with pytest.raises(SourceError):
        load("pickle:weights.pth", tmp_path, trust=True)


def test_pinned_digest_is_checked_first(tmp_path: Path) -> None:
    (tmp_path / "bad.pth").write_bytes(b"anything")
    with pytest.raises(SourceError) as caught:
        load("pickle:bad.pth", tmp_path, trust=True, sha256="0" * 64)
    assert caught.value.code == "CP-FETCH-DIGEST"
