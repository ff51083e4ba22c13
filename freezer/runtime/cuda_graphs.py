"""CUDA graphs of payloads for one size: a call is captured once and then replayed, which launches
all kernels at once.

A graph reads and writes the same memory at every replay. So each has its own input tensors, into
which the inputs of a call are copied, and returns copies. Each graph runs one call at a time:
threads wait for a lock, streams for the end of the last call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from freezer.artifact import Payload, is_exact
from freezer.errors import CudaGraphsError, first_line

NUM_WARM_UP = 4
"""Calls before the capture: TorchScript fuses after its second call; libraries choose algorithms
and allocate in the first.
"""

_Call = Callable[[list[Tensor]], Sequence[Tensor]]
"""Runs a payload on tensors."""


class CudaGraphs:
    """Graphs of one model's payloads, each captured in the first call that its payload serves.
    Thread-safe.

    Args:
        device: a GPU, which must be the current one in every call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._graphs: dict[str, _Graph] = {}

    def run(
        self,
        payload: Payload,
        call: _Call,
        tensors: list[Tensor],
    ) -> Sequence[Tensor]:
        """Run a call, by a graph if the payload is for one size.

        Args:
            payload: serves the call.
            call: runs the payload.
            tensors: inputs, on the device.

        Raises:
            CudaGraphsError: the payload cannot be captured.
        """
        if not is_exact(payload):
            return call(tensors)
        with self._lock:
            if payload.path not in self._graphs:
                try:
                    self._graphs[payload.path] = _Graph(call, tensors, self._device)
                except RuntimeError as error:
                    raise CudaGraphsError(
                        f"{payload.path} cannot be captured as a CUDA graph: {first_line(error)};"
                        " load it without cuda_graphs"
                    ) from error
            graph = self._graphs[payload.path]
        return graph(tensors)


class _Graph:
    """One captured call."""

    def __init__(
        self,
        call: _Call,
        tensors: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        self._lock = threading.Lock()
        self._inputs = [tensor.clone() for tensor in tensors]
        side = torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(NUM_WARM_UP):
                call(self._inputs)
        current.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # torch's default capture stream belongs to the GPU of its first capture. "thread_local":
        # other threads may allocate.
        with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):
            outputs = call(self._inputs)
        self._outputs = list(outputs)
        self._done = torch.cuda.Event()
        self._done.record(current)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with self._lock:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            for static, tensor in zip(self._inputs, tensors, strict=True):
                static.copy_(tensor)
            self._graph.replay()
            results = [tensor.clone() for tensor in self._outputs]
            self._done.record(stream)
        return results
