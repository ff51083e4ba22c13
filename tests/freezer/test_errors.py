"""Errors: pickling, codes, and the tree in the docstring."""

from __future__ import annotations

import pickle

import pytest

from freezer import errors
from freezer.errors import (
    CatalogError,
    ColdpressError,
    FreezeError,
    IncompatibleError,
    Refusal,
    first_line,
)

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, ColdpressError)
]


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_survive_pickling(kind: type[ColdpressError]) -> None:
    error = kind("what, got, expected, remedy")
    assert error.code.startswith("CP-")
    error.code = "CP-FINER"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.coded, again.args) == ("CP-FINER: what, got, expected, remedy", error.args)


def test_attributes_survive_pickling() -> None:
    catalog = pickle.loads(pickle.dumps(CatalogError("is wrong", entry="bert", field="dims.batch")))
    assert (catalog.entry, catalog.field) == ("bert", "dims.batch")
    ladder = (Refusal(rung="portable", reason="canary", got="1", expected="2"),)
    assert pickle.loads(pickle.dumps(IncompatibleError("no rung", ladder))).ladder == ladder


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:s3cret@host/a.pt?sig=s3cret&x=1#s3cret: got", "https://host/a.pt got"),
        ("'s3://s3cret:s3cret@b/p?key=s3cret' and gs://b/p", "'s3://b/p' and gs://b/p"),
        ("https://me:p@s3cret?#@host/a@v1.pt", "https://host/a@v1.pt"),
        ("with url: /a.pt?token=s3cret (Caused by x)", "with url: /a.pt (Caused by x)"),
        ("torchscript:data/a?b.pt; is it?", "torchscript:data/a?b.pt; is it?"),
    ],
)
def test_credentials_in_urls_are_removed(text: str, shown: str) -> None:
    assert str(ColdpressError(text)) == shown


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "[ONNXRuntimeError] : 1 : FAIL : Load model from /tmp/a b.onnx failed:/onnxruntime_src"
            "/onnxruntime/core/graph/model.cc:256 onnxruntime::Model::Model(onnx::ModelProto&&, "
            "const std::function<void(int)>&) Unsupported model IR version: 99\n",
            "Unsupported model IR version: 99",
        ),
        (
            "[ONNXRuntimeError] : 10 : INVALID_GRAPH : This is an invalid model. In Node, "
            '("node_a", Nope, "", -1) : ("x": tensor(float),) -> ("y": tensor(float),) , Error No '
            "Op registered for Nope",
            "No Op registered for Nope",
        ),
        (
            "Exception from src/inference/src/cpp/core.cpp:105:\nCheck 'a == b' failed at "
            "src/core/convolution.hpp:330:\nWhile validating node 'opset1::Convolution (x[0]:f32"
            "[1..4,4]) -> ()' with friendly_name 'C':\nPads are too large.\n\n",
            "Pads are too large.",
        ),
        ("\n", "RuntimeError"),
    ],
)
def test_first_line_of_an_engine(text: str, cause: str) -> None:
    assert first_line(RuntimeError(text)) == cause


def test_kinds_and_codes_differ() -> None:
    kinds = [kind.kind for kind in CLASSES if issubclass(kind, FreezeError)]
    codes = [vars(kind)["code"] for kind in CLASSES if "code" in vars(kind)]
    assert len(set(kinds)) == len(kinds)
    assert len(set(codes)) == len(codes)
