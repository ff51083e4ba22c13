"""Call a service with NVIDIA's client of the open inference protocol, in an environment of its own:
numpy and tritonclient[http]. Prints the largest error of each form.

    python triton_client.py HOST:PORT MODEL ARRAYS.npz    # inputs by name, and the output `output`
"""

import json
import sys

import numpy as np
import tritonclient.http as client  # type: ignore[import-not-found]


def error_of(server: client.InferenceServerClient, model: str, forms: tuple[bool, bool]) -> float:
    """The largest error of the output, with inputs and outputs as binary data or in JSON."""
    arrays = dict(np.load(sys.argv[3]))
    expected = arrays.pop("output")
    declared = {item["name"]: item for item in server.get_model_metadata(model)["inputs"]}
    inputs = []
    for name, array in arrays.items():
        item = client.InferInput(name, list(array.shape), declared[name]["datatype"])
        item.set_data_from_numpy(array, binary_data=forms[0])
        inputs.append(item)
    wanted = [client.InferRequestedOutput("output", binary_data=forms[1])]
    found = server.infer(model, inputs, outputs=wanted, request_id="7")
    assert found.get_response()["id"] == "7"
    return float(np.abs(found.as_numpy("output") - expected).max())


def main() -> None:
    """Check health and metadata, and print the errors of each form."""
    server, model = client.InferenceServerClient(sys.argv[1]), sys.argv[2]
    assert server.is_server_live()
    assert server.is_server_ready()
    assert server.is_model_ready(model)
    assert "binary_tensor_data" in server.get_server_metadata()["extensions"]
    found: dict[str, float] = {
        "json": error_of(server, model, (False, False)),
        "binary": error_of(server, model, (True, True)),
        "mixed": error_of(server, model, (True, False)),
    }
    wrong = client.InferInput("no-such-input", [1], "FP32")
    wrong.set_data_from_numpy(np.zeros(1, np.float32))
    try:
        server.infer(model, [wrong])
    except client.InferenceServerException as error:
        found["refused"] = int(error.status())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
