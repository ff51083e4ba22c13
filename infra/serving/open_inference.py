"""The open inference protocol (V2) over HTTP, in JSON and with the binary tensor data extension.

OPEN_ENDPOINTS lists its paths. With the extension, a body is JSON of
`Inference-Header-Content-Length` bytes, and after it the arrays in order; see "Binary Tensor Data
Extension" of Triton's documentation. 16-bit floats travel in binary alone. Errors are
`{"error": ...}`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version as installed_version
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from freezer.artifact.triton import DATATYPES, sizes_of
from freezer.errors import ContractError, expected_names
from freezer.runtime.arrays import dtype_of
from freezer.serving.following import Loaded
from freezer.spec import OutputSpec, TensorSpec
from infra.serving.bodies import BINARY, JSON, array_of, refusal
from infra.serving.model_server import KEY, ModelServer

HEADER = "inference-header-content-length"

BINARY_ONLY = ("FP16", "BF16")
"""Datatypes that JSON does not carry."""

_MODEL = "/v2/models/{name}[/versions/{version}]"

OPEN_ENDPOINTS: Mapping[str, str] = {
    "GET /v2": "this list",
    "GET /v2/health/live": "whether the process responds",
    "GET /v2/health/ready": "whether a model serves",
    "GET /v2/models": "names of models",
    f"GET {_MODEL}": "inputs and outputs",
    f"GET {_MODEL}/ready": "whether the model serves",
    f"POST {_MODEL}/infer": "answer a request, in JSON or with binary tensor data",
}
"""The endpoints, with what each one returns."""

_UNSUPPORTED = ("shared_memory_region", "classification", "sequence_id")
"""Parameters that would change an answer, of extensions that this server lacks."""


class _Part(BaseModel):
    """What has parameters, by name."""

    parameters: dict[str, Any] = Field(default_factory=dict)


class _Input(_Part):
    """An input of a request."""

    name: str
    shape: list[NonNegativeInt]
    datatype: str
    data: Any = None


class _Output(_Part):
    """An output that a request asks for."""

    name: str


class _Request(_Part):
    """A request for an answer."""

    id: str = ""
    inputs: list[_Input]
    outputs: list[_Output] = Field(default_factory=list)


class OpenForm:
    """The form of one request for an answer.

    Args:
        header: value of HEADER; None without binary data.
    """

    invalid = 400

    def __init__(self, header: str | None) -> None:
        self._header = header
        self._id = ""
        self._wanted: dict[str, bool] = {}
        self._datatypes: dict[str, str] = {}

    def read(self, body: bytes, model: Any) -> dict[str, Any]:
        """The inputs by name; remembers which outputs are wanted, and in which form.

        Raises:
            ContractError: the body is not such a request, or asks for what this server or the model
                lacks.
        """
        length = _header_bytes(self._header, len(body))
        request = _parsed(body[:length])
        _check_parameters(request)
        self._id = request.id
        self._datatypes = {item.name: datatype_of(item) for item in model.outputs}
        self._wanted = _wanted(request, self._datatypes)
        known = {item.name: item for item in model.inputs.tensors}
        inputs: dict[str, Any] = {}
        at = length
        for item in request.inputs:
            if item.name not in known:
                raise ContractError(f"input {item.name!r}: {expected_names(item.name, known)}")
            if item.name in inputs:
                raise ContractError(f"input {item.name!r} is given twice; expected it once")
            size = _binary_bytes(item)
            data = None if size is None else body[at : at + size]
            inputs[item.name] = self._array(known[item.name], item, data)
            at += size or 0
        if at != len(body):
            raise ContractError(
                f"the body has {len(body) - length} bytes of binary data, and its inputs name"
                f" {at - length} by binary_data_size"
            )
        return inputs

    def _array(self, spec: TensorSpec, given: _Input, data: bytes | None) -> Any:
        """The array of an input; the model checks its shape."""
        datatype = datatype_of(spec)
        if given.datatype != datatype:
            raise ContractError(
                f"input {spec.name!r}: got datatype {given.datatype!r}, expected {datatype!r}"
            )
        if data is None:
            if datatype in BINARY_ONLY:
                raise ContractError(
                    f"input {spec.name!r}: got JSON, expected binary data for {datatype}"
                )
            return array_of(spec, given.data, given.shape)
        num_bytes = math.prod(given.shape) * dtype_of(spec.dtype).itemsize
        if len(data) != num_bytes:
            raise ContractError(
                f"input {spec.name!r}: got {len(data)} bytes, expected {num_bytes} for {datatype}"
                f" {given.shape}"
            )
        if datatype == "BOOL" and data.translate(None, b"\0\1"):
            raise ContractError(f"input {spec.name!r}: got bytes that are neither 0 nor 1")
        return np.ndarray(given.shape, dtype_of(spec.dtype), buffer=bytearray(data))

    def write(self, outputs: Mapping[str, Any], labels: Mapping[str, str]) -> Response:
        """The wanted outputs, in the order in which they are wanted."""
        entries = []
        blobs: list[bytes] = []
        for name, binary in self._wanted.items():
            leaf = outputs[name]
            entry: dict[str, Any] = {
                "name": name,
                "datatype": self._datatypes[name],
                "shape": list(leaf.shape),
            }
            if binary:
                blobs.append(leaf.tobytes())
                entry["parameters"] = {"binary_data_size": len(blobs[-1])}
            else:
                entry["data"] = leaf.reshape(-1).tolist()
            entries.append(entry)
        answer = {"model_name": labels["model"], "model_version": labels["version"]}
        if self._id:
            answer["id"] = self._id
        header = json.dumps({**answer, "outputs": entries}).encode()
        if not blobs:
            return Response(header, media_type=JSON)
        content = b"".join((header, *blobs))
        return Response(content, media_type=BINARY, headers={HEADER: str(len(header))})

    def refuse(self, status: int, detail: str) -> Response:
        """See BodyForm."""
        return protocol_error(status, detail)


def protocol_error(status: int, detail: str) -> Response:
    """An error of the protocol."""
    return refusal(status, detail, key="error")


def datatype_of(spec: TensorSpec | OutputSpec) -> str:
    """The protocol's name of a dtype.

    Raises:
        ContractError: it has none.
    """
    if spec.dtype not in DATATYPES:
        raise ContractError(
            f"{spec.name!r} is {spec.dtype}, which the open inference protocol lacks; POST /predict"
            " with a .safetensors file"
        )
    return DATATYPES[spec.dtype]


def _header_bytes(header: str | None, num_bytes: int) -> int:
    """The length of the JSON in a body."""
    if header is None:
        return num_bytes
    if not header.isdecimal() or not 0 < int(header) <= num_bytes:
        raise ContractError(
            f"Inference-Header-Content-Length: got {header!r}, expected the length of the JSON in a"
            f" body of {num_bytes} bytes"
        )
    return int(header)


def _parsed(content: bytes) -> _Request:
    try:
        return _Request.model_validate_json(content)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise ContractError(
            f"{place}: {first['msg']}; expected a request of the open inference protocol, whose"
            " inputs have name, shape, datatype and data"
        ) from None


def _check_parameters(request: _Request) -> None:
    """Refuse parameters of extensions that would change the answer."""
    parts: Sequence[_Part] = (request, *request.inputs, *request.outputs)
    for item in parts:
        for name in _UNSUPPORTED:
            if item.parameters.get(name):
                raise ContractError(f"the parameter {name!r} is not supported; omit it")


def _binary_bytes(item: _Input) -> int | None:
    """The size of an input's binary data; None if it is in JSON."""
    size = item.parameters.get("binary_data_size")
    if size is None:
        return None
    if type(size) is not int or size < 0 or item.data is not None:
        raise ContractError(
            f"input {item.name!r}: got binary_data_size {size!r}, expected a number of bytes, and"
            " no data"
        )
    return size


def _wanted(request: _Request, datatypes: Mapping[str, str]) -> dict[str, bool]:
    """Whether each wanted output is binary, by name."""
    every = request.parameters.get("binary_data_output", False) is True
    wanted = dict.fromkeys(() if request.outputs else datatypes, every)
    for output in request.outputs:
        if output.name not in datatypes:
            raise ContractError(f"output {output.name!r}: {expected_names(output.name, datatypes)}")
        wanted[output.name] = output.parameters.get("binary_data", every) is True
    for name, binary in wanted.items():
        if not binary and datatypes[name] in BINARY_ONLY:
            raise ContractError(
                f"output {name!r} is {datatypes[name]}, which JSON does not carry; set binary_data"
            )
    return wanted


def metadata_of(loaded: Loaded) -> dict[str, Any]:
    """Names, datatypes and shapes of a model, with -1 for sizes that vary.

    Raises:
        ContractError: a tensor is complex.
    """
    shapes: dict[str, Sequence[int | str | None]] = dict(loaded.prepared.shapes)
    shapes |= {item.name: item.shape for item in loaded.model.inputs.tensors}

    def described(spec: TensorSpec | OutputSpec) -> dict[str, Any]:
        shape = sizes_of(shapes[spec.name])
        return {"name": spec.name, "datatype": datatype_of(spec), "shape": shape}

    return {
        "name": loaded.labels["model"],
        "versions": [loaded.labels["version"]],
        "platform": "coldpress",
        "inputs": list(map(described, loaded.model.inputs.tensors)),
        "outputs": list(map(described, loaded.model.outputs)),
    }


class OpenInference:
    """The endpoints of the protocol for one model.

    Args:
        server: the model.
    """

    def __init__(self, server: ModelServer) -> None:
        self._server = server

    def router(self) -> APIRouter:
        """The routes, all below /v2."""
        router = APIRouter(prefix="/v2")
        router.add_api_route("", self.about)
        router.add_api_route("/health/live", self.live)
        router.add_api_route("/health/ready", self.ready)
        router.add_api_route("/models", self.models)
        for model in ("/models/{name}", "/models/{name}/versions/{version}"):
            router.add_api_route(model, self.metadata)
            router.add_api_route(f"{model}/ready", self.model_ready)
            router.add_api_route(f"{model}/infer", self.infer, methods=["POST"])
        every = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        router.add_api_route("/{path:path}", self.unknown, methods=every)
        return router

    async def about(self) -> Response:
        """The server."""
        return JSONResponse(
            {
                "name": "coldpress",
                "version": installed_version("coldpress"),
                "extensions": ["binary_tensor_data"],
                "endpoints": OPEN_ENDPOINTS,
            }
        )

    async def live(self) -> Response:
        """Whether the process responds."""
        return JSONResponse({"live": True})

    async def ready(self) -> Response:
        """Whether a model serves."""
        if self._server.loaded is None:
            return protocol_error(503, self._server.problem)
        return JSONResponse({"live": True, "ready": True})

    async def models(self) -> Response:
        """Names of models: one."""
        return JSONResponse({"models": [self._server.model]})

    async def metadata(self, name: str, version: str | None = None) -> Response:
        """Inputs and outputs of the model."""
        refused = self._refused(name, version)
        if refused is not None:
            return refused
        assert self._server.loaded is not None, "it is not refused"
        try:
            return JSONResponse(metadata_of(self._server.loaded))
        except ContractError as lacking:
            return protocol_error(501, lacking.coded)

    async def model_ready(self, name: str, version: str | None = None) -> Response:
        """Whether the model serves."""
        return self._refused(name, version) or JSONResponse({"name": name, "ready": True})

    async def infer(self, request: Request, name: str, version: str | None = None) -> Response:
        """Answer a request."""
        refused = self._refused(name, version)
        if refused is not None and self._server.loaded is not None:
            return refused
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            return protocol_error(415, f"got content-encoding {encoding!r}; send the body as it is")
        form = OpenForm(request.headers.get(HEADER))
        return await self._server.respond(request.stream(), form, request.headers.get(KEY))

    async def unknown(self, path: str) -> Response:
        """Refuse any other path or method."""
        return protocol_error(404, f"/v2/{path} is not an endpoint; GET /v2 lists them")

    def _refused(self, name: str, version: str | None) -> Response | None:
        """Why a model cannot be asked; None if it can."""
        known = self._server.model
        if name != known:
            return protocol_error(
                404, f"model {name!r} is not here; {expected_names(name, [known])}"
            )
        if self._server.loaded is None:
            return protocol_error(503, self._server.problem)
        serves = self._server.loaded.labels["version"]
        if version not in (None, serves):
            return protocol_error(
                404, f"{name}: got version {version!r}, expected {serves!r}, which serves"
            )
        return None
