"""FrozenModel: payloads behind the input contract.

Payloads check nothing, so the contract checks everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from freezer.artifact import Manifest, Payload
from freezer.errors import ContractError, Refusal
from freezer.runtime.cuda_graphs import CudaGraphs
from freezer.runtime.devices import CPU, current
from freezer.runtime.input_contract import InputContract
from freezer.runtime.payload_choice import OpenPayload, PayloadChoice
from freezer.runtime.precision import full_on_gpu
from freezer.runtime.preserved import REFUSED_NAMES, Preserved, read, refusal
from freezer.runtime.rebuilding import rebuilder
from freezer.runtime.threads import own_count, threads
from freezer.spec import InputSpec, OutputSpec, OutputStructure


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOptions:
    """How calls of a frozen model run.

    Attributes:
        preserve: names of preserved attributes and methods. They belong to one payload, so only one
            may be open.
        num_threads: for payloads that fit any thread count; None for the calling thread's own.
        device: that inputs must be on: the CPU, or a GPU with its index.
        cuda_graphs: on a GPU, capture calls of payloads for one size (cuda_graphs.py).
    """

    preserve: Sequence[str] = ()
    num_threads: int | None = None
    device: torch.device = CPU
    cuda_graphs: bool = False


DEFAULT_CALLS = CallOptions()


class FrozenModel:
    """A callable that enforces its input contract.

    Inputs are given by name, or by position in the order of `inputs`; tensors within tuples, lists
    and dicts as in the source model, or each by its path (`**{"state.0": h}`). Lists and tuples are
    interchangeable. Names, dtypes, devices, ranks and sizes are checked, and tensors are made
    contiguous, as payloads require. The result has the structure of the source model's; a dataclass
    or ModelOutput is returned as a mapping with the same attributes, keys and positions.

    A call is served by the most specific payload for its sizes (`payload_for`), with that payload's
    thread count; the calling thread's own count is restored afterwards. On a GPU, inputs and
    outputs are on `device`; calls run on the current stream in full precision (precision.py) and
    are not waited for.

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
        options: CallOptions = DEFAULT_CALLS,
    ) -> None:
        if options.preserve and len(payloads) != 1:
            names = ", ".join(options.preserve)
            raise ContractError(
                f"{names}: preserved by one payload, but {len(payloads)} are open; freeze the model"
                " again"
            )
        self.inputs = spec
        self.outputs = outputs
        self.manifest = manifest
        self.ladder = tuple(ladder)
        self.training = False
        self.device = options.device
        self._contract = InputContract(spec, options.device)
        held = manifest.payloads if manifest else tuple(opened.payload for opened in payloads)
        self._choice = PayloadChoice(payloads, [dim.name for dim in spec.dims], held)
        self._rebuild = rebuilder(structure)
        self._num_threads = options.num_threads
        self._on_cpu = options.device.type == "cpu"
        self._graphs = CudaGraphs(options.device) if options.cuda_graphs else None
        only = payloads[0] if options.preserve else None
        num_threads = (only.payload.num_threads or options.num_threads) if only else None
        # Last: __setattr__ passes later assignments to the payload, or refuses them.
        self.preserved = Preserved(
            options.preserve, only.run if only else None, num_threads, options.device
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result.

        Raises:
            ContractError: an input is missing, unknown, or does not meet the contract.
        """
        tensors, point = self._contract.tensors_of(args, kwargs)
        opened = self._choice.choose(point)
        wanted = opened.payload.num_threads or self._num_threads
        if wanted is None or wanted == own_count():
            return self._run(opened, tensors)
        with threads(wanted):
            return self._run(opened, tensors)

    def payload_for(self, shape: Mapping[str, int], threads: int | None = None) -> Payload:
        """The payload that serves inputs of these sizes.

        Args:
            shape: the size of every declared dim by name; `{}` where none is declared.
            threads: choose among all payloads of the artifact for a process that may use this many
                threads; by default among the open ones.

        Raises:
            ContractError: no payload serves these sizes, or they are not those of the declared
                dims.
        """
        return self._choice.payload_for(shape, threads)

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

    def __setattr__(self, name: str, value: Any) -> None:
        if "preserved" not in self.__dict__:
            object.__setattr__(self, name, value)
        elif name in self.__dict__ or hasattr(type(self), name):
            there = f"; use model.preserved[{name!r}]" if name in self.preserved else ""
            raise ContractError(
                f"{name!r} of a frozen model cannot be set: it is the frozen model's own{there}",
                code="CP-FROZEN",
            )
        else:
            self.preserved[name] = value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name.partition(".")[0] for name in self.preserved)})

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ContractError(
            "a frozen model cannot be copied or pickled: its payload is open in this process; call"
            " freezer.load in each process",
            code="CP-FROZEN",
        )

    def __repr__(self) -> str:
        made_for = (
            f"{self.manifest.model} for {self.manifest.device_class}"
            if self.manifest
            else "a candidate"
        )
        return f"FrozenModel({made_for}; {', '.join(self._contract.names)})"

    def _run(self, opened: OpenPayload, tensors: list[Tensor]) -> Any:
        with torch.no_grad():
            if self._on_cpu:
                return self._rebuild(self._leaves(opened, tensors))
            with current(self.device), full_on_gpu():
                if self._graphs is None:
                    return self._rebuild(self._leaves(opened, tensors))
                return self._rebuild(
                    self._graphs.run(opened.payload, partial(self._leaves, opened), tensors)
                )

    def _leaves(self, opened: OpenPayload, tensors: list[Tensor]) -> Sequence[Tensor]:
        """The output tensors in order."""
        if opened.payload.convention == "flat":
            found: Sequence[Tensor] = opened.run(*tensors)
            return found
        return self._contract.call_native(opened.run, tensors)
