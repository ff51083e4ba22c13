"""The entrants of benchmarks/peers.py: eager, the peers, each built and run as its documentation
says, and the published artifact.

An entrant is a function. It takes a `Case` and returns a `Built`: the call to time, and a note
about the settings that apply. It runs in a process of its own, without gradients, after
`torch.set_num_threads`. `PEERS` lists all, with the documentation they follow.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from freezer.hardware import available_cpus

CONSENT = "-consent"
"""Suffix of the store with the artifacts that were published with consent to lower precision."""

TUNING_S = 0.3
"""Time for which each setting of an engine is timed, twice, to find its best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """One set of inputs, as the model takes them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, in the order in which an exported program takes them."""
        return [
            leaf
            for leaf in pytree.tree_leaves((self.args, dict(self.kwargs)))
            if isinstance(leaf, Tensor)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model for an entrant.

    Attributes:
        name: of the model, also in the store.
        model: in eval mode.
        inputs: sets of inputs of one shape; the first is the example for captures.
        num_threads: that the entrant may use.
        folder: for files of this model; its entrants share it.
        store: that the artifact is loaded from.
    """

    name: str
    model: nn.Module
    inputs: Sequence[Inputs]
    num_threads: int
    folder: Path
    store: str

    @property
    def all_cpus(self) -> bool:
        """Whether the entrant may use every CPU, which engines do by default."""
        return self.num_threads == available_cpus()


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """An entrant that is ready.

    Attributes:
        bind: makes the call with one set of inputs, which returns tensors or arrays, nested or not.
        note: settings that apply; of an artifact its recipe.
    """

    bind: Callable[[Inputs], Callable[[], Any]]
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """An entrant of the contest.

    Attributes:
        title: for tables.
        build: builds it.
        at: whether it runs at its defaults, or at settings beyond them; eager and published
            artifacts are neither.
        follows: the documentation.
        packages: distributions that it needs beside torch, with the module of each.
        alone: whether it measures while it builds, so that nothing else may be built meanwhile.
    """

    title: str
    build: Callable[[Case], Built]
    at: Literal["defaults", "settings", "baseline", "published", "consent"]
    follows: str = ""
    packages: Mapping[str, str] | None = None
    alone: bool = False


def eager(case: Case) -> Built:
    """The model itself."""
    return _called(case.model)


def torch_compile(case: Case) -> Built:
    """torch.compile with frozen weights."""
    import torch._inductor.config

    torch._inductor.config.freezing = True
    return _called(torch.compile(case.model))


def max_autotune(case: Case) -> Built:
    """torch.compile with frozen weights and matrix products chosen by timing."""
    import torch._inductor.config

    torch._inductor.config.freezing = True
    return _called(torch.compile(case.model, mode="max-autotune"))


def torchscript_freeze(case: Case) -> Built:
    """A frozen trace, or the frozen script of a model that is TorchScript already."""
    frozen = torch.jit.freeze(_scripted(case))
    return Built(bind=lambda inputs: lambda: frozen(*inputs.tensors))


def torchscript_optimized(case: Case) -> Built:
    """The same, and torch.jit.optimize_for_inference."""
    frozen = torch.jit.optimize_for_inference(torch.jit.freeze(_scripted(case)))
    return Built(bind=lambda inputs: lambda: frozen(*inputs.tensors))


def aot_inductor(case: Case) -> Built:
    """torch.export and AOTInductor with frozen weights."""
    import torch._inductor

    program = torch.export.export(case.model, case.inputs[0].args, dict(case.inputs[0].kwargs))
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(case.folder / "model.pt2"), inductor_configs={"freezing": True}
    )
    return _called(torch._inductor.aoti_load_package(path))


def onnx_runtime(case: Case) -> Built:
    """An exported ONNX model in a session without options."""
    return _session(_onnx_file(case), {}, case)


def onnx_runtime_best(case: Case) -> Built:
    """The fastest of some settings of ONNX Runtime, and its optimizer for transformers."""
    path = _onnx_file(case)
    settings: dict[str, Callable[[], Built]] = {
        "defaults": lambda: _session(path, {}, case),
        "no spinning": lambda: _session(path, {"session.intra_op.allow_spinning": "0"}, case),
        "denormals as zero": lambda: _session(path, {"session.set_denormal_as_zero": "1"}, case),
        "dynamic blocks": lambda: _session(path, {"session.dynamic_block_base": "4"}, case),
        "transformers' optimizer": lambda: _session(_for_transformers(path), {}, case),
    }
    return _fastest(settings, case)


def openvino(case: Case) -> Built:
    """A converted model, compiled for the CPU without options."""
    return _openvino_model(
        case, {} if case.all_cpus else {"INFERENCE_NUM_THREADS": case.num_threads}
    )


def openvino_best(case: Case) -> Built:
    """The fastest of some settings of OpenVINO in float32, with inputs and outputs shared with the
    engine.
    """
    latency = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": case.num_threads,
    }
    settings: dict[str, Callable[[], Built]] = {
        "latency, f32": lambda: _openvino_model(case, latency, share=True),
        "latency, f32, not pinned": lambda: _openvino_model(
            case, {**latency, "ENABLE_CPU_PINNING": False}, share=True
        ),
        "latency, f32, denormals as zero": lambda: _openvino_model(
            case, {**latency, "CPU_DENORMALS_OPTIMIZATION": True}, share=True
        ),
    }
    return _fastest(settings, case)


def olive(case: Case) -> Built:
    """The ONNX model, optimized by Olive's command for this device and float32, in a session
    without options.
    """
    folder = case.folder / "olive"
    options = {
        "-m": str(_onnx_file(case)),
        "--provider": "CPUExecutionProvider",
        "--device": "cpu",
        "--precision": "fp32",
    }
    command = [
        sys.executable,
        "-m",
        "olive",
        "optimize",
        *(part for pair in options.items() for part in pair),
    ]
    subprocess.run(
        [*command, "-o", str(folder), "--disable_telemetry"], check=True, cwd=case.folder
    )
    return _session(folder / "model.onnx", {}, case)


def published(case: Case) -> Built:
    """The artifact that Coldpress published for this machine."""
    return _artifact(case, case.store)


def with_consent(case: Case) -> Built:
    """The artifact that it published with consent to bfloat16 and int8."""
    return _artifact(case, case.store + CONSENT)


def _artifact(case: Case, store: str) -> Built:
    import freezer
    from freezer.spec import text_of

    model = freezer.load(case.name, store=store)
    manifest = model.manifest
    assert manifest is not None
    note = f"{manifest.recipe.name} for {manifest.device_class}"
    if manifest.accuracy is not None:
        measured = [text_of(name, value) for name, value in manifest.accuracy.measured.items()]
        note += f"; {manifest.accuracy}; measured {', '.join(measured)}"
    return Built(bind=_called(model).bind, note=note)


PEERS: Mapping[str, Peer] = {
    "eager": Peer(title="eager", build=eager, at="baseline"),
    "compile": Peer(
        title="torch.compile, freezing",
        build=torch_compile,
        at="defaults",
        follows=(
            "https://docs.pytorch.org/tutorials/unstable/max_autotune_on_CPU_tutorial.html (without"
            " its mode)"
        ),
    ),
    "max-autotune": Peer(
        title="torch.compile, max-autotune",
        build=max_autotune,
        at="settings",
        follows="https://docs.pytorch.org/tutorials/unstable/max_autotune_on_CPU_tutorial.html",
        alone=True,
    ),
    "torchscript": Peer(
        title="TorchScript freeze",
        build=torchscript_freeze,
        at="defaults",
        follows="https://docs.pytorch.org/docs/stable/generated/torch.jit.freeze.html",
    ),
    "torchscript-optimized": Peer(
        title="optimize_for_inference",
        build=torchscript_optimized,
        at="defaults",
        follows=(
            "https://docs.pytorch.org/docs/stable/generated/torch.jit.optimize_for_inference.html"
        ),
    ),
    "aoti": Peer(
        title="AOTInductor, freezing",
        build=aot_inductor,
        at="defaults",
        follows="https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html",
    ),
    "onnxruntime": Peer(
        title="ONNX Runtime",
        build=onnx_runtime,
        at="defaults",
        follows="https://onnxruntime.ai/docs/get-started/with-python.html",
        packages={"onnxruntime": "onnxruntime", "onnxscript": "onnxscript"},
    ),
    "onnxruntime-best": Peer(
        title="ONNX Runtime, best settings",
        build=onnx_runtime_best,
        at="settings",
        follows=(
            "https://onnxruntime.ai/docs/performance/tune-performance/threading.html and "
            "https://onnxruntime.ai/docs/performance/transformers-optimization.html"
        ),
        packages={"onnxruntime": "onnxruntime", "onnxscript": "onnxscript"},
        alone=True,
    ),
    "openvino": Peer(
        title="OpenVINO",
        build=openvino,
        at="defaults",
        follows="https://docs.openvino.ai/2025/openvino-workflow/model-preparation/convert-model-pytorch.html",
        packages={"openvino": "openvino"},
    ),
    "openvino-best": Peer(
        title="OpenVINO, best settings",
        build=openvino_best,
        at="settings",
        follows="https://docs.openvino.ai/2025/openvino-workflow/running-inference/inference-devices-and-modes/cpu-device.html",
        packages={"openvino": "openvino"},
        alone=True,
    ),
    "olive": Peer(
        title="Olive",
        build=olive,
        at="defaults",
        follows="https://microsoft.github.io/Olive/reference/cli.html",
        packages={"olive-ai": "olive", "onnxruntime": "onnxruntime", "onnxscript": "onnxscript"},
    ),
    "coldpress": Peer(
        title="Coldpress, published",
        build=published,
        at="published",
        follows="docs/guides/deploy.md",
    ),
    "consent": Peer(
        title="Coldpress, with consent",
        build=with_consent,
        at="consent",
        follows="docs/guides/lower-precision.md",
    ),
}
"""All entrants, in the order of the tables."""


def arrays_of(result: Any) -> list[Tensor]:
    """The tensors of a result, in order; arrays become tensors."""
    leaves = result if isinstance(result, list) else pytree.tree_leaves(result)
    if isinstance(result, Mapping):  # also of types that are not registered with pytree
        leaves = [leaf for value in result.values() for leaf in arrays_of(value)]
    return [
        leaf if isinstance(leaf, Tensor) else torch.as_tensor(leaf)
        for leaf in leaves
        if leaf is not None
    ]


def _called(model: Callable[..., Any]) -> Built:
    return Built(bind=lambda inputs: lambda: model(*inputs.args, **inputs.kwargs))


class _Traceable(nn.Module):
    """A model that takes the tensors of its inputs and returns those of its outputs:
    torch.jit.trace knows no other structures.
    """

    def __init__(self, model: nn.Module, example: Inputs) -> None:
        super().__init__()
        self.model = model
        leaves, self._structure = pytree.tree_flatten((example.args, dict(example.kwargs)))
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        left = iter(tensors)
        leaves = [
            next(left) if given else value
            for given, value in zip(self._is_tensor, self._constants, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return tuple(arrays_of(self.model(*args, **kwargs)))


def _scripted(case: Case) -> torch.jit.ScriptModule:
    if isinstance(case.model, torch.jit.ScriptModule):
        return case.model
    wrapped = _Traceable(case.model, case.inputs[0]).eval()
    traced: torch.jit.ScriptModule = torch.jit.trace(
        wrapped, tuple(case.inputs[0].tensors), check_trace=False
    )
    return traced


def _onnx_file(case: Case) -> Path:
    """The ONNX model, written by the first entrant that needs it; TorchScript only has the older
    exporter.
    """
    path, example = case.folder / "model.onnx", case.inputs[0]
    if path.exists():
        return path
    own = path.with_suffix(f".{os.getpid()}")
    if isinstance(case.model, torch.jit.ScriptModule):
        torch.onnx.export(case.model, tuple(example.tensors), str(own), dynamo=False)
    else:
        program = torch.onnx.export(
            case.model, example.args, kwargs=dict(example.kwargs), dynamo=True, verbose=False
        )
        assert program is not None
        program.save(str(own))
    os.replace(own, path)
    return path


def _for_transformers(path: Path) -> Path:
    """The ONNX model after ONNX Runtime's optimizer for transformers."""
    from onnxruntime.transformers import optimizer

    fused = path.with_name("transformers.onnx")
    model = optimizer.optimize_model(str(path), model_type="bert", num_heads=0, hidden_size=0)
    if not any(model.get_fused_operator_statistics().values()):
        raise RuntimeError("nothing to fuse")
    model.save_model_to_file(str(fused))
    return fused


def _session(path: Path, entries: Mapping[str, str], case: Case) -> Built:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if not case.all_cpus:
        options.intra_op_num_threads = case.num_threads
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]

    def bind(inputs: Inputs) -> Callable[[], Any]:
        feeds = {name: tensor.numpy() for name, tensor in zip(names, inputs.tensors, strict=True)}
        return lambda: session.run(None, feeds)

    return Built(bind=bind)


def _openvino_model(case: Case, config: Mapping[str, Any], *, share: bool = False) -> Built:
    import openvino as ov

    example = case.inputs[0]
    if isinstance(case.model, torch.jit.ScriptModule):
        converted = ov.convert_model(case.model, example_input=tuple(example.tensors))
    else:
        converted = ov.convert_model(
            torch.export.export(case.model, example.args, dict(example.kwargs))
        )
    compiled = ov.compile_model(converted, "CPU", dict(config))
    note = f"precision hint {compiled.get_property('INFERENCE_PRECISION_HINT').get_type_name()}"
    options = {"share_inputs": True, "share_outputs": True} if share else {}

    def bind(inputs: Inputs) -> Callable[[], Any]:
        arrays = [tensor.numpy() for tensor in inputs.tensors]
        return lambda: list(compiled(arrays, **options).values())

    return Built(bind=bind, note=note)


def _fastest(settings: Mapping[str, Callable[[], Built]], case: Case) -> Built:
    """The fastest of some settings, by the better of two medians; the note names it, and those that
    do not work.

    Each is discarded before the next is built, so that the threads of one never disturb another.
    """
    found, failed = dict[str, float](), list[str]()
    for name, build in settings.items():
        try:
            found[name] = _tuned_s(build, case.inputs[0])
        except Exception as error:
            failed.append(f"not {name}: {str(error).splitlines()[0]}")
        gc.collect()
    if not found:
        raise RuntimeError("; ".join(failed))
    best = min(found, key=lambda name: found[name])
    built = settings[best]()
    return Built(
        bind=built.bind,
        note="; ".join([f"best: {best}", *([built.note] if built.note else []), *failed]),
    )


def _tuned_s(build: Callable[[], Built], inputs: Inputs) -> float:
    call = build().bind(inputs)
    return min(_median_s(call) for _ in range(2))


def _median_s(call: Callable[[], Any]) -> float:
    call()
    taken, deadline = list[float](), time.perf_counter() + TUNING_S
    while len(taken) < 3 or time.perf_counter() < deadline:
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def missing_packages(names: Iterable[str]) -> dict[str, str]:
    """The entrants among some that cannot run here, and the package that each lacks."""
    from importlib.util import find_spec

    lacks = {
        name: [
            package
            for package, module in (PEERS[name].packages or {}).items()
            if find_spec(module) is None
        ]
        for name in names
    }
    return {name: packages[0] for name, packages in lacks.items() if packages}
