"""Sources: python factories, TorchScript files, transformers classes and folders; digests of weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from freezer.errors import SourceError
from freezer.legacy import torchscript_deprecations_silenced
from freezer.python_modules import find_function, module_file
from freezer.sources import Source, load_source, parse_source, weights_digest
from tests.models import Counter, Mlp, mlp, seeded
from tests.steps import random_inputs

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


def test_a_factory_is_called_with_its_arguments() -> None:
    model = load("python:tests.models:mlp", args={"hidden": 5})
    assert isinstance(model, Mlp)
    assert model.first.out_features == 5
    assert not model.training


def test_a_factorys_random_weights_come_from_the_seed(tmp_path: Path) -> None:
    (tmp_path / "seeded_module.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(2, 2)\n")
    one, same, other = (
        weights_digest(load("python:seeded_module:make", seed=seed, search_path=(str(tmp_path),))) for seed in (0, 0, 1)
    )
    assert one == same != other


def test_a_module_is_found_in_the_search_path_and_may_import_its_neighbours_late(tmp_path: Path) -> None:
    (tmp_path / "late_neighbour.py").write_text("from torch import nn\nmodel = nn.Linear(2, 3)\n")
    (tmp_path / "late_factory.py").write_text("def make():\n    import late_neighbour\n    return late_neighbour.model\n")
    path = list(sys.path)
    assert isinstance(load("python:late_factory:make", search_path=(str(tmp_path),)), nn.Linear)
    assert sys.path == path
    assert module_file("late_factory", [str(tmp_path)]) == tmp_path / "late_factory.py"


def test_the_file_of_a_module_is_found_without_importing_it(tmp_path: Path) -> None:
    (tmp_path / "package_x").mkdir()
    (tmp_path / "package_x" / "inner.py").write_text("raise RuntimeError('imported')\n")
    assert module_file("package_x.inner", [str(tmp_path)]) == tmp_path / "package_x" / "inner.py"
    assert module_file("package_x.none", [str(tmp_path)]) is None
    assert module_file("no_such_package.inner", [str(tmp_path)]) is None


def test_a_torchscript_file_is_loaded_from_the_catalogs_folder(tmp_path: Path) -> None:
    with torchscript_deprecations_silenced():
        torch.jit.save(torch.jit.script(mlp().train()), str(tmp_path / "mlp.jit"))
    model = load("torchscript:mlp.jit", tmp_path)
    assert not model.training
    assert torch.equal(model(X), mlp()(X))


def test_a_transformers_config_makes_random_weights_from_the_seed() -> None:
    one, same, other = (load("transformers:BertConfig", args=TINY_BERT, weights="random", seed=seed) for seed in (0, 0, 1))
    assert type(one).__name__ == "BertModel"
    assert weights_digest(one) == weights_digest(same) != weights_digest(other)
    named = load("transformers:BertForSequenceClassification", args=TINY_BERT, weights="random")
    assert type(named).__name__ == "BertForSequenceClassification"


def test_a_transformers_folder_is_loaded_as_what_it_was_saved(tmp_path: Path) -> None:
    saved = load("transformers:BertForSequenceClassification", args=TINY_BERT, weights="random")
    saved.save_pretrained(tmp_path / "bert")  # type: ignore[operator]
    source = parse_source("transformers:bert", folder=tmp_path)
    assert source.location == str(tmp_path / "bert")
    loaded = load_source(source)
    assert type(loaded) is type(saved)
    assert weights_digest(loaded) == weights_digest(saved)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("resnet50", "got 'resnet50', expected python:…, torchscript:…, export:…"),
        ("python:", "expected python:…"),
        ("onnx:model.onnx", "expected python:…"),
        ("model.pt", "a path needs its kind before it, as in torchscript:model.pt"),
        ("pickle:model.pt", "runs code when it is loaded; add `trust: true`"),
        ("python:module", "expected python:MODULE:FUNCTION"),
        ("torchscript:none.jit", r"none\.jit is not there; paths are relative to the catalog's folder"),
    ],
)
def test_a_bad_source_is_named_before_anything_is_loaded(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        parse_source(text, folder=tmp_path)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("python:tests.models:none", {}, "module 'tests.models' has no function 'none'; it has: .*mlp"),
        ("python:tests.no_such:mlp", {}, "module 'tests.no_such' cannot be imported: ModuleNotFoundError"),
        ("python:tests.models:no_model", {}, "gave a str, expected an nn.Module"),
        ("python:tests.models:broken", {}, "source python:tests.models:broken: RuntimeError: weights are gone"),
        ("python:tests.models:mlp", {"args": {"width": 1}}, "TypeError: .*unexpected keyword argument 'width'"),
        ("transformers:NoSuchConfig", {"weights": "random"}, "has no class 'NoSuchConfig'"),
        ("torchscript:bad.jit", {}, "source torchscript:.*bad.jit: RuntimeError"),
    ],
)
def test_a_source_that_gives_no_model_says_why(tmp_path: Path, text: str, settings: Any, message: str) -> None:
    (tmp_path / "bad.jit").write_bytes(b"no zip")
    with pytest.raises(SourceError, match=message):
        load(text, tmp_path, **settings)


def test_a_module_that_raises_on_import_is_a_source_error(tmp_path: Path) -> None:
    (tmp_path / "raising_module.py").write_text("1 / 0\n")
    with pytest.raises(SourceError, match="'raising_module' cannot be imported: ZeroDivisionError"):
        find_function("raising_module:make", [str(tmp_path)])


def test_a_source_is_written_as_it_was_read() -> None:
    assert str(Source(kind="python", location="a.b:c")) == "python:a.b:c"


# Weights


def test_the_digest_is_of_every_parameter_and_buffer() -> None:
    digests = {weights_digest(mlp()), weights_digest(mlp(9)), weights_digest(mlp().double()), weights_digest(mlp().half())}
    assert len(digests) == 4
    assert weights_digest(mlp()) == weights_digest(mlp())
    counter = seeded(Counter)
    before = weights_digest(counter)
    counter(X)
    assert weights_digest(counter) != before


def test_buffers_that_are_not_persistent_count_too() -> None:
    one, other = nn.Module(), nn.Module()
    one.register_buffer("table", torch.zeros(2), persistent=False)
    other.register_buffer("table", torch.ones(2), persistent=False)
    assert weights_digest(one) != weights_digest(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool, torch.int8])
def test_every_dtype_has_a_digest(dtype: torch.dtype) -> None:
    def of(value: int) -> str:
        module = nn.Module()
        module.register_buffer("values", torch.full((3,), value).to(dtype))
        module.register_buffer("empty", torch.empty(0, dtype=dtype))
        return weights_digest(module)

    assert of(0) != of(1)


def test_strides_do_not_matter_to_the_digest() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.load_state_dict(one.state_dict())
    other.weight = nn.Parameter(other.weight.detach().t().contiguous().t())
    assert weights_digest(one) == weights_digest(other)
