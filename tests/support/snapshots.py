"""The full state of a model and of the process, to compare before and after."""

from __future__ import annotations

import copy
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from freezer.runtime.tensors import bytes_of

CONFIGS: Mapping[str, Any] = {
    "dynamo": torch._dynamo.config,
    "inductor": torch._inductor.config,
    "functorch": torch._functorch.config,
}

VENDORED = "setuptools/_vendor"
"""The end of a path that the import of setuptools adds to sys.path; Inductor imports it."""


def tensor_state(tensor: Tensor) -> Any:
    grad = tensor.grad if tensor.is_leaf else None
    return (
        id(tensor),
        tensor.data_ptr(),
        tensor._version,
        bytes_of(tensor).tolist(),
        (
            tensor.dtype,
            tensor.device,
            tensor.shape,
            tensor.stride(),
            tensor.requires_grad,
            tensor.is_leaf,
        ),
        None if grad is None else (id(grad), grad._version, bytes_of(grad).tolist()),
    )


def value_state(value: Any) -> Any:
    """The identity and content of an attribute, without following modules."""
    if isinstance(value, Tensor):
        return tensor_state(value)
    if isinstance(value, Mapping):
        return (id(value), {key: value_state(item) for key, item in value.items()})
    if isinstance(value, list | tuple | set):
        return (id(value), [value_state(item) for item in value])
    return (id(value), value if isinstance(value, str | int | float | bool | None) else None)


def model_state(model: nn.Module) -> Any:
    """The state of a model that freezing could change: the class and every attribute of every
    module.
    """
    return {
        name: (id(module), type(module), value_state(vars(module)))
        for name, module in model.named_modules()
    }


def script_state(model: Any) -> Any:
    """The same for a ScriptModule, which creates new tensor objects at each access."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    states = {name: tensor_state(tensor)[1:5] for name, tensor in tensors.items()}
    return states, getattr(model, "training", None), model.code, str(model.graph)


def process_state() -> dict[str, Any]:
    """The state of the process that freezing could change."""
    return {
        "random": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_anomaly_enabled(),
        ),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "precision": (
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32,
            torch.backends.cuda.matmul.allow_tf32,
        ),
        "backends": (
            torch.backends.mkldnn.enabled,
            torch.backends.mkldnn.deterministic,
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "jit": (
            torch._C._get_graph_executor_optimize(),
            torch._C._jit_texpr_fuser_enabled(),
            torch.jit._state._enabled.enabled,
        ),
        "modes": len(_get_current_dispatch_mode_stack()),
        "warnings": (list(warnings.filters), id(warnings.showwarning)),
        "environment": dict(os.environ),
        "path": ([path for path in sys.path if not path.endswith(VENDORED)], str(Path.cwd())),
        "streams": (id(sys.stdout), id(sys.stderr)),
        "signals": [
            signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
        ],
        "logging": {
            name: logging.getLogger(name).level
            for name in ("", "torch", "torch._dynamo", "torch._inductor", "torch.fx")
        },
        "running": [thread.name for thread in threading.enumerate() if not thread.daemon],
        **{name: _comparable(config.get_config_copy()) for name, config in CONFIGS.items()},
    }


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of settings, without those that differ from their copy, such as torchao's pass."""
    copied = copy.deepcopy(dict(settings))
    return {name: value for name, value in copied.items() if value == settings[name]}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names of the entries that differ. Threads of earlier tests may end meanwhile."""
    changed = [name for name in before if name != "running" and before[name] != after.get(name)]
    return [*changed, *(Counter(after["running"]) - Counter(before["running"]))]
