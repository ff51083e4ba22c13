"""Payloads of one size as CUDA graphs: a call is captured once and replayed ever after, which launches all of its kernels at once.

A graph reads and writes the same memory at every replay. So each has inputs of its own, which a call's are copied into, and results
are copies. Of each graph one call is under way at a time, whatever threads and streams they come from: a thread waits for a lock,
and a stream for the last call's end on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from freezer.artifact.manifest import Manifest, Payload
from freezer.artifact.payload_selection import is_exact
from freezer.errors import CudaGraphsError, first_line

NUM_WARM_UP = 4
"""Calls before the capture: TorchScript fuses after its second, and libraries choose and allocate in their first."""

Call = Callable[[list[Tensor]], Sequence[Tensor]]
"""What a payload makes of tensors."""


def check_graphs(manifest: Manifest, payloads: Sequence[Payload], device: torch.device) -> None:
    """Hold that calls of an artifact may be captured.

    Args:
        manifest: of the artifact that serves.
        payloads: that were chosen of it.
        device: that it serves on.

    Raises:
        CudaGraphsError: they may not; the message says why.
    """
    why = None
    if device.type != "cuda":
        why = f"what serves here is made for {manifest.device_class}, which runs on no GPU; name a CUDA class, or strict=True"
    elif manifest.stateful:
        why = "a call changes its state, which a replay would take from where it was captured"
    elif not manifest.drift.deterministic:
        why = "it draws by chance, or sums in another order each time, so that a replay cannot be held against it"
    elif not any(is_exact(payload) for payload in payloads):
        dims = ", ".join(str(dim) for payload in payloads for dim in payload.dims)
        why = f"it has no payload of one size ({dims}); freeze it with `points`, or without dims"
    if why is not None:
        raise CudaGraphsError(
            f"{manifest.model} for {manifest.device_class}: no CUDA graphs: {why}; or load it without cuda_graphs"
        )


class CudaGraphs:
    """The graphs of one model's payloads, each captured at the first call that its payload serves.

    Safe to call from many threads.

    Args:
        device: a GPU, which must be the current one in every call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._graphs: dict[str, _Graph] = {}

    def run(self, payload: Payload, call: Call, tensors: list[Tensor]) -> Sequence[Tensor]:
        """The results of a call; of a payload for several sizes, which no graph serves, without a capture.

        Args:
            payload: that serves the call.
            call: what it makes of tensors; the same at every call.
            tensors: of the call, on the device.

        Raises:
            CudaGraphsError: the payload does what cannot be captured.
        """
        if not is_exact(payload):
            return call(tensors)
        with self._lock:
            graph = self._graphs.get(payload.path)
            if graph is None:
                graph = self._graphs[payload.path] = self._captured(payload, call, tensors)
        return graph(tensors)

    def _captured(self, payload: Payload, call: Call, tensors: list[Tensor]) -> _Graph:
        try:
            return _Graph(call, tensors, self._device)
        except RuntimeError as error:
            raise CudaGraphsError(
                f"{payload.path} cannot be captured as a CUDA graph: {first_line(error)}; load it without cuda_graphs"
            ) from error


class _Graph:
    """One captured call."""

    def __init__(self, call: Call, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._lock = threading.Lock()
        self._inputs = [tensor.clone() for tensor in tensors]
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(NUM_WARM_UP):
                call(self._inputs)
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # On a stream of this GPU: torch's own belongs to the GPU that it first captured on. Other threads may allocate meanwhile:
        # only what this one does that cannot be captured is an error.
        with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):
            self._outputs = list(call(self._inputs))
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(device))

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with self._lock:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            for own, given in zip(self._inputs, tensors, strict=True):
                own.copy_(given)
            self._graph.replay()
            results = [tensor.clone() for tensor in self._outputs]
            self._done.record(stream)
        return results
