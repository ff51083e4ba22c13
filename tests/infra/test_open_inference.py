"""The open inference protocol of the HTTP service: in JSON, with binary tensor data, its errors,
and by an independent client.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import requests
import torch
from torch import nn

import freezer
from freezer.artifact.triton import DATATYPES
from freezer.errors import ContractError
from freezer.runtime.arrays import widened
from freezer.spec import DTYPES, OutputSpec, declared_spec
from freezer.store import Store
from infra.serving.http_server import SERVICE_ENDPOINTS
from infra.serving.open_inference import HEADER, OpenForm
from tests.support.commands import finished
from tests.support.raylets import ROOT
from tests.support.served import Service, serving
from tests.support.services import X
from tests.support.steps import BATCH, HERE, artifact_of, quickly, random_inputs

VALUES = X.flatten().tolist()
INPUT = {"name": "x", "shape": [2, 4], "datatype": "FP32", "data": VALUES}
BINARY_INPUT = {**INPUT, "data": None, "parameters": {"binary_data_size": 32}}

CLIENT_PYTHON = os.environ.get("COLDPRESS_TRITON_CLIENT", "")
"""An interpreter with tritonclient[http], such as of a virtual environment of its own."""


@pytest.fixture(scope="module")
def service(published: Store) -> Iterator[Service]:
    with serving(published, reload_s=60) as found:
        found.wait_for_version(1)
        yield found


@pytest.fixture(scope="module")
def expected(published: Store) -> torch.Tensor:
    output: torch.Tensor = freezer.load("mlp", store=published.uri, device_class=HERE)(X)
    return output


def infer(
    service: Service, body: bytes, header: object = None, path: str = "mlp"
) -> requests.Response:
    headers = {} if header is None else {HEADER: str(header)}
    url = f"{service.url}/v2/models/{path}/infer"
    return requests.post(url, data=body, headers=headers, timeout=60)


def asked(*inputs: Mapping[str, Any], **fields: Any) -> bytes:
    """The JSON of a request."""
    return json.dumps({"inputs": inputs or [INPUT], **fields}).encode()


def test_metadata_is_the_contract(service: Service) -> None:
    for path in ("mlp", "mlp/versions/1"):
        assert service.get(f"/v2/models/{path}").json() == {
            "name": "mlp",
            "versions": ["1"],
            "platform": "coldpress",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, 3]}],
        }
        assert service.get(f"/v2/models/{path}/ready").json() == {"name": "mlp", "ready": True}
    assert service.get("/v2/models").json() == {"models": ["mlp"]}
    assert service.get("/v2/health/live").json() == {"live": True}
    assert service.get("/v2/health/ready").status_code == 200
    about = service.get("/v2").json()
    assert (about["name"], about["extensions"]) == ("coldpress", ["binary_tensor_data"])


def test_listed_endpoints_are_those_that_answer(service: Service) -> None:
    """Each with its method: no other error than a missing body."""
    listed = service.get("/").json()
    assert (listed["model"], listed["endpoints"]) == ("mlp", dict(SERVICE_ENDPOINTS))
    assert service.get("/v2").json()["endpoints"].items() < listed["endpoints"].items()
    for endpoint in listed["endpoints"]:
        method, path = endpoint.split()
        for version in ("", "/versions/1"):
            url = path.replace("{name}", "mlp").replace("[/versions/{version}]", version)
            answer = requests.request(method, service.url + url, timeout=60)
            assert answer.status_code in (200, 400, 422), endpoint


@pytest.mark.parametrize("data", [VALUES, X.tolist()], ids=["flat", "nested"])
def test_json_answers_equal_the_models(
    service: Service, expected: torch.Tensor, data: list[Any]
) -> None:
    for path in ("mlp", "mlp/versions/1"):
        found = infer(service, asked({**INPUT, "data": data}, id="7"), path=path).json()
        (output,) = found.pop("outputs")
        assert found == {"model_name": "mlp", "model_version": "1", "id": "7"}
        assert (output["name"], output["datatype"]) == ("output", "FP32")
        assert torch.equal(torch.tensor(output["data"]).reshape(output["shape"]), expected)


@pytest.mark.parametrize(
    "wanted",
    [
        {"parameters": {"binary_data_output": True}},
        {"outputs": [{"name": "output", "parameters": {"binary_data": True}}]},
        {"outputs": [{"name": "output"}], "parameters": {"binary_data_output": True}},
    ],
)
def test_binary_answers_equal_the_models(
    service: Service, expected: torch.Tensor, wanted: dict[str, Any]
) -> None:
    header = asked(BINARY_INPUT, **wanted)
    answer = infer(service, header + X.numpy().tobytes(), len(header))
    assert answer.headers["content-type"] == "application/octet-stream"
    length = int(answer.headers[HEADER])
    (output,) = json.loads(answer.content[:length])["outputs"]
    data = answer.content[length:]
    assert output["parameters"] == {"binary_data_size": len(data)}
    values = np.frombuffer(data, np.float32).reshape(output["shape"])
    assert torch.equal(torch.from_numpy(values.copy()), expected)


def test_outputs_may_be_json_beside_binary_inputs(service: Service, expected: torch.Tensor) -> None:
    wanted = {"outputs": [{"name": "output", "parameters": {"binary_data": False}}]}
    header = asked(BINARY_INPUT, parameters={"binary_data_output": True}, **wanted)
    answer = infer(service, header + X.numpy().tobytes(), len(header))
    assert HEADER not in answer.headers
    assert answer.json()["outputs"][0]["data"] == expected.flatten().tolist()


@pytest.mark.parametrize(
    ("body", "header"),
    [
        (b"", None),
        (b"\xff{", None),
        (b"[" * 100_000, None),
        (b"[]", None),
        (b'{"inputs": [{"name": "x"}]}', None),
        (asked(id=7), None),
        (asked({**INPUT, "name": "y"}), None),
        (asked(INPUT, INPUT), None),
        (asked({**INPUT, "shape": [2, 3]}), None),
        (asked({**INPUT, "shape": [4, 2]}), None),
        (asked({**INPUT, "shape": [2, -4]}), None),
        (asked({**INPUT, "shape": [5, 4], "data": [0.0] * 20}), None),
        (asked({**INPUT, "datatype": "INT64"}), None),
        (asked({**INPUT, "datatype": "BYTES", "data": ["a"] * 8}), None),
        (asked({**INPUT, "data": ["a"] * 8}), None),
        (asked({**INPUT, "data": None}), None),
        (asked({**INPUT, "parameters": {"binary_data_size": 32}}), None),
        (asked(outputs=[{"name": "other"}]), None),
        (asked(outputs=[{"name": "output", "parameters": {"classification": 1}}]), None),
        (asked({**INPUT, "parameters": {"shared_memory_region": "a"}}), None),
        (asked(BINARY_INPUT), None),
        (asked(), 0),
        (asked(), 10**6),
        (asked(), "-1"),
        (asked() + b"1", len(asked())),
        (asked(BINARY_INPUT) + bytes(31), len(asked(BINARY_INPUT))),
        (
            asked({**BINARY_INPUT, "parameters": {"binary_data_size": "32"}}) + bytes(32),
            len(asked({**BINARY_INPUT, "parameters": {"binary_data_size": "32"}})),
        ),
    ],
)
def test_wrong_requests_get_400(service: Service, body: bytes, header: object) -> None:
    before = service.metric("requests_total", outcome="invalid")
    answer = infer(service, body, header)
    assert answer.status_code == 400
    (problem,) = answer.json().values()
    assert list(answer.json()) == ["error"]
    assert (problem.startswith("CP-CONTRACT: "), "\n" in problem) == (True, False), problem
    assert service.metric("requests_total", outcome="invalid") == before + 1


@pytest.mark.parametrize(
    "path", ["models/other", "models/mlp/versions/2", "models/other/ready", "other", ""]
)
def test_unknown_names_get_404(service: Service, path: str) -> None:
    answer = service.get(f"/v2/{path}")
    assert (answer.status_code, list(answer.json())) == (404, ["error"])


def test_unknown_models_answer_nothing(service: Service) -> None:
    for path in ("other", "mlp/versions/2"):
        assert infer(service, asked(), path=path).status_code == 404
    compressed = {"content-encoding": "gzip"}
    url = f"{service.url}/v2/models/mlp/infer"
    answer = requests.post(url, data=asked(), headers=compressed, timeout=60)
    assert (answer.status_code, list(answer.json())) == (415, ["error"])


def model_of(dtype: str, shape: Sequence[int] = (2, 2)) -> Any:
    """A model with an input and an output of a dtype, as far as a form reads it."""
    inputs = declared_spec({"x": {"shape": list(shape), "dtype": dtype}}, {})
    return SimpleNamespace(
        inputs=inputs, outputs=(OutputSpec(name="y", dtype=dtype, rank=len(shape)),)
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
def test_binary_data_holds_every_dtype(dtype: str) -> None:
    if dtype not in DATATYPES:  # complex
        with pytest.raises(ContractError):
            OpenForm(None).read(asked(INPUT), model_of(dtype))
        return
    given = torch.tensor([[0, 1], [1, 0]]).to(getattr(torch, dtype))
    data = bytes_of(given)
    item = {"name": "x", "shape": [2, 2], "datatype": DATATYPES[dtype]}
    header = asked(
        {**item, "parameters": {"binary_data_size": len(data)}},
        parameters={"binary_data_output": True},
    )
    form = OpenForm(str(len(header)))
    read = form.read(header + data, model_of(dtype))["x"]
    assert np.array_equal(widened(read), given.to(getattr(torch, widened(read).dtype.name)).numpy())
    answer = form.write({"y": read}, {"model": "m", "version": "1"})
    assert bytes(answer.body).endswith(data)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_need_binary_data(dtype: str) -> None:
    """In requests, and in answers."""
    item = {"name": "x", "shape": [2, 2], "datatype": DATATYPES[dtype], "data": [0.0] * 4}
    binary = {"parameters": {"binary_data_output": True}}
    with pytest.raises(ContractError):
        OpenForm(None).read(asked(item, **binary), model_of(dtype))
    header = asked({**item, "data": None, "parameters": {"binary_data_size": 8}})
    with pytest.raises(ContractError):
        OpenForm(str(len(header))).read(header + bytes(8), model_of(dtype))


def test_bools_are_bytes_of_0_or_1() -> None:
    item = {"name": "x", "shape": [4], "datatype": "BOOL", "parameters": {"binary_data_size": 4}}
    header = asked(item)
    form = OpenForm(str(len(header)))
    with pytest.raises(ContractError):
        form.read(header + b"\0\1\2\0", model_of("bool", [4]))


def test_scalars_have_an_empty_shape() -> None:
    item = {"name": "x", "shape": [], "datatype": "FP32", "data": [2.5]}
    form = OpenForm(None)
    read = form.read(asked(item), model_of("float32", ()))["x"]
    assert (tuple(read.shape), float(read)) == ((), 2.5)
    answer = json.loads(bytes(form.write({"y": read}, {"model": "m", "version": "1"}).body))
    assert answer["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [], "data": [2.5]}]


@pytest.mark.slow
@pytest.mark.skipif(not CLIENT_PYTHON, reason="COLDPRESS_TRITON_CLIENT names no interpreter")
@pytest.mark.parametrize("batching", [0, 4])
def test_tritons_client_gets_the_models_answers(
    published: Store, expected: torch.Tensor, tmp_path: Path, batching: int
) -> None:
    """A small input, and an image: in JSON, in binary data, and in both."""
    image = random_inputs(1, 3, 224, 224)
    convnet = nn.Sequential(nn.Conv2d(3, 4, 3, stride=8), nn.ReLU(), nn.Flatten()).eval()
    batch = {"input": {0: BATCH}}
    frozen = quickly(convnet, {"input": image}, tmp_path / "out", dims=batch, name="convnet")
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("convnet", source_key="key", artifacts=[artifact_of(frozen)])
    answer = freezer.load("convnet", store=store.uri, device_class=HERE)(image)
    for source, model, arrays, output in (
        (published, "mlp", {"x": X}, expected),
        (store, "convnet", {"input": image}, answer),
    ):
        given: dict[str, Any] = {name: x.numpy() for name, x in arrays.items()}
        np.savez(tmp_path / "arrays.npz", output=output.numpy(), **given)
        with serving(source, model, max_batch=batching, reload_s=60) as started:
            started.wait_for_version(1)
            script = ROOT / "tests" / "support" / "triton_client.py"
            address = started.url.removeprefix("http://")
            done = finished(CLIENT_PYTHON, script, address, model, tmp_path / "arrays.npz")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {"json": 0.0, "binary": 0.0, "mixed": 0.0, "refused": 400}
