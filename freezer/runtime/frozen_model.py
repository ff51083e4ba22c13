"""FrozenModel: payloads behind the input contract.

Payloads check nothing, so the contract checks everything.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from freezer.artifact import ENGINES, Manifest
from freezer.errors import ContractError, Refusal
from freezer.runtime.contract import OpenModel, OpenPayload, check_indices, input_error
from freezer.runtime.devices import CPU, current
from freezer.runtime.loaders import own_memory
from freezer.runtime.native import checked_array
from freezer.runtime.preserved import REFUSED_NAMES, Preserved, read, refusal
from freezer.runtime.tensors import address_of, dtype_name, leaves_of, to_array, to_tensor
from freezer.runtime.torch_settings import (
    default_context,
    full_on_gpu,
    own_count,
    tf32_on_gpu,
    threads,
)
from freezer.spec import FLOAT32, InputSpec, OutputSpec, OutputStructure, TensorSpec, put_together

logger = logging.getLogger("coldpress")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOptions:
    """How calls of a frozen model run.

    Attributes:
        preserve: names of preserved attributes and methods. They belong to one payload, so only one
            may be open.
        num_threads: for payloads that fit any thread count; None for the calling thread's own.
        device: that inputs must be on: the CPU, or a GPU with its index.
        precision: of the recipe; a GPU multiplies float32 in TF32 if it is `tf32`.
        as_numpy: return numpy arrays; bfloat16, which numpy lacks, as float32.
    """

    preserve: Sequence[str] = ()
    num_threads: int | None = None
    device: torch.device = CPU
    precision: str = FLOAT32
    as_numpy: bool = False


class FrozenModel(OpenModel):
    """A callable that enforces its input contract.

    Inputs are given by name, or by position in the order of `inputs`; tensors within tuples, lists
    and dicts as in the source model, or each by its path (`**{"state.0": h}`). Lists and tuples are
    interchangeable. In place of tensors it takes anything that has `__dlpack__` or `__array__`;
    numpy arrays are copied to the device. Names, dtypes, devices, ranks and sizes are checked, and
    tensors are made contiguous, as payloads require. The result has the structure of the source
    model's; a dataclass or ModelOutput is returned as a mapping with the same attributes, keys and
    positions.

    A call is served by the most specific payload for its sizes (`payload_for`), with that payload's
    thread count; the calling thread's own count is restored afterwards. On a GPU, inputs and
    outputs are on `device`; calls run on the current stream in the precision of the recipe
    (torch_settings.py), and are not waited for.

    Preserved attributes and methods work as in the source: `model.version = 2`, `model.reset()`,
    `model.sub.version`. If a name collides with one of this class, such as `inputs`, use
    `model.preserved["inputs"]`. Nothing else can be set. Other methods of nn.Module (`.to()`,
    `.half()`, `.train()`, `.parameters()`) raise a ContractError that names the remedy; `.eval()`
    and `.train(False)` return the model.

    Attributes:
        inputs: the input spec.
        outputs: names, dtypes and ranks of the output tensors.
        manifest: of the artifact; None for a candidate.
        ladder: artifacts that were refused before this one at load.
        preserved: preserved attributes and methods by name, those of submodules dotted; get, set
            and call them by index.
        training: False.
        device: that inputs must be on: the CPU, or a GPU with its index.

    Args:
        payloads: for one thread count, or for any; the first that accepts the sizes of a call
            serves it.

    Raises:
        NotPreservedError: the payload lacks a name to preserve.
    """

    def __init__(
        self,
        *,
        spec: InputSpec,
        outputs: tuple[OutputSpec, ...],
        structure: OutputStructure,
        payloads: Sequence[OpenPayload],
        manifest: Manifest | None = None,
        ladder: Sequence[Refusal] = (),
        options: CallOptions = CallOptions(),
    ) -> None:
        if options.preserve and len(payloads) != 1:
            names = ", ".join(options.preserve)
            raise ContractError(
                f"{names}: preserved by one payload, but {len(payloads)} are open; freeze the model"
                " again"
            )
        super().__init__(
            spec=spec,
            outputs=outputs,
            structure=structure,
            payloads=payloads,
            manifest=manifest,
            ladder=ladder,
        )
        self.training = False
        self.device = options.device
        self._num_threads = options.num_threads
        self._as_numpy = options.as_numpy
        self._on_cpu = options.device.type == "cpu"
        self._on_gpu = tf32_on_gpu() if options.precision == "tf32" else full_on_gpu()
        self._own = set().union(*(own_memory(opened.run) for opened in payloads))
        first = payloads[0]
        # Last: __setattr__ passes later assignments to the payload, or refuses them.
        self.preserved = Preserved(
            options.preserve,
            first.run,
            first.payload.num_threads or options.num_threads,
            options.device,
        )

    def leaves(
        self,
        /,
        *args: object,
        **kwargs: object,
    ) -> Sequence[Any]:
        """The outputs in the order of `outputs`; see OpenModel."""
        is_forked = self._process_id != os.getpid()
        answer = self._answer_after_fork if is_forked else self._answer
        outputs = answer(args, kwargs)
        return [to_array(output) for output in outputs] if self._as_numpy else outputs

    def _answer(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Sequence[Tensor]:
        tensors, point = self._binding.leaves(args, kwargs, self._check)
        opened = self._choose(point)
        num_threads = opened.payload.num_threads or self._num_threads
        if num_threads is None or num_threads == own_count():
            return self._run(opened, tensors)
        with threads(num_threads):
            return self._run(opened, tensors)

    def _answer_after_fork(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Sequence[Tensor]:
        """Answer in a thread of this process, since OpenMP waits for ever in the thread that
        forked: each thread has threads of its own for torch's payloads, those of engines are gone.
        """
        if not self._on_cpu or any(opened.payload.kind in ENGINES for opened in self._payloads):
            self._refuse_after_fork()
        return _thread_of(os.getpid()).submit(self._answer, args, kwargs).result()

    def eval(self) -> FrozenModel:
        """The model itself, which is always in eval mode."""
        return self

    def train(self, mode: bool = True) -> FrozenModel:
        """The model itself if `mode` is False.

        Raises:
            ContractError: `mode` is True; code CP-FROZEN.
        """
        if mode:
            refusal("train")()
        return self

    def __getattr__(self, name: str) -> Any:
        preserved = self.__dict__.get("preserved")
        if preserved is None or (name.startswith("_") and name not in preserved):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in REFUSED_NAMES and name not in preserved:
            return refusal(name)
        return read(preserved, name)

    def __setattr__(
        self,
        name: str,
        value: object,
    ) -> None:
        if "preserved" not in self.__dict__:
            object.__setattr__(self, name, value)
        elif name in self.__dict__ or hasattr(type(self), name):
            remedy = f"; use model.preserved[{name!r}]" if name in self.preserved else ""
            raise ContractError(
                f"{name!r} of a frozen model cannot be set: it is the frozen model's own{remedy}",
                code="CP-FROZEN",
            )
        else:
            self.preserved[name] = value

    def _check(
        self,
        spec: TensorSpec,
        value: object,
    ) -> Tensor:
        """An input as a payload may read it."""
        if not isinstance(value, Tensor):
            value = self._tensor_of(spec, value)
        here = value.is_cpu if self._on_cpu else value.device == self.device
        dtype = getattr(torch, spec.dtype)
        if value.dtype is not dtype or not here or value.layout is not torch.strided:
            raise input_error(spec, _tensor_problem(spec, value, self.device))
        if spec.indices is not None and value.numel():
            least, greatest = torch.aminmax(value)
            check_indices(spec, int(least), int(greatest))
        # A lazy conjugate or negative shares memory with its source; a payload reads the memory.
        if value.is_neg() or value.is_conj():
            value = value.resolve_conj().resolve_neg()
        return value if value.is_contiguous() else value.contiguous()

    def _tensor_of(self, spec: TensorSpec, value: Any) -> Tensor:
        """A tensor made of an array, or of another library's tensor."""
        is_array = isinstance(value, np.ndarray | np.generic)
        if self._on_cpu or is_array or not hasattr(value, "__dlpack__"):
            return to_tensor(checked_array(spec, value)).to(self.device)
        return from_dlpack(value)

    def _run(
        self,
        opened: OpenPayload,
        tensors: list[Tensor],
    ) -> Sequence[Tensor]:
        with torch.no_grad(), default_context(self.device):
            if self._on_cpu:
                outputs = self._outputs(opened, tensors)
                if self._own:
                    outputs = [
                        output.clone() if address_of(output) in self._own else output
                        for output in outputs
                    ]
                return outputs
            with current(self.device), self._on_gpu:
                return self._outputs(opened, tensors)

    def _outputs(
        self,
        opened: OpenPayload,
        tensors: list[Tensor],
    ) -> Sequence[Tensor]:
        """The output tensors in order."""
        if opened.payload.convention == "flat":
            outputs: Sequence[Tensor] = opened.run(*tensors)
            return outputs
        # A native payload is called like the source model.
        leaves = {
            spec.name: tensor for spec, tensor in zip(self._binding.tensors, tensors, strict=True)
        }
        values = {item.name: put_together(item, leaves) for item in self.inputs.inputs}
        if self.inputs.style == "positional":
            result = opened.run(*values.values())
        else:
            result = opened.run(**values)
        return leaves_of(result)


@functools.cache
def _thread_of(process_id: int) -> ThreadPoolExecutor:
    """The thread in which a forked process calls the models of its parent, one call at a time."""
    logger.warning(
        "process %d calls a model that was loaded before it was forked: calls run one after the"
        " other; load the model after the fork to run them side by side",
        process_id,
    )
    return ThreadPoolExecutor(1, thread_name_prefix="coldpress-forked")


def _tensor_problem(
    spec: TensorSpec,
    value: Tensor,
    device: torch.device,
) -> str:
    """Describe a tensor of another dtype, device or layout."""
    if value.dtype is not getattr(torch, spec.dtype):
        name = dtype_name(value.dtype)
        return f"got dtype {name}, expected {spec.dtype}; convert it with .to(torch.{spec.dtype})"
    if value.device != device:
        return f"got device {value.device}, expected {device}; move it with .to({str(device)!r})"
    return f"got layout {value.layout}, expected a dense tensor; use .to_dense()"
