"""Load a source: a Python function, TorchScript, an exported program, a pickle or a transformers
model. And wrappers that call ScriptModules differently.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule

from freezer.errors import SourceError
from freezer.files import digest_file
from freezer.freezing.models.exported_program import module_of, spec_of
from freezer.freezing.models.hugging_face import load_transformers, source_errors
from freezer.freezing.sources import TRUST, Source, find_function, on_path
from freezer.runtime.loaders import LEGACY, code_in, torchscript_deprecations_silenced
from freezer.spec import ConstantSpec, InputItem, InputSpec, TensorSpec

OWN_SPEC = "coldpress.inputs"
"""The key of a loaded model's own input spec in the `meta` of its graph."""


def load_source(source: Source) -> nn.Module:
    """Load the model onto the CPU, in eval mode.

    Raises:
        SourceError: it cannot be loaded, or is not an nn.Module.
        MissingDependencyError: the kind needs a package that is not installed.
    """
    if source.sha256 is not None:  # before anything opens the file
        sha256 = digest_file(Path(source.location)).removeprefix("sha256:")
        if sha256 != source.sha256:
            raise SourceError(
                f"source {source}: got sha256 {sha256}, expected {source.sha256}; the file is not"
                " the pinned one, or has changed",
                code="CP-FETCH-DIGEST",
            )
    torch.manual_seed(source.seed)
    with source_errors(source):
        model = SOURCE_LOADERS[source.kind](source)
    if not isinstance(model, nn.Module):
        raise SourceError(
            f"source {source} returned a {type(model).__name__}, expected an nn.Module; return the"
            " model itself"
        )
    return model.eval()


def _load_python(source: Source) -> Any:
    factory = find_function(source.location, source.search_path)
    with on_path(source.search_path):  # a factory may import modules beside it
        return factory(**source.args)


def _load_torchscript(source: Source) -> Any:
    with torchscript_deprecations_silenced():
        module = torch.jit.load(source.location, map_location="cpu")
        return with_forward(module, source.method) if source.method else module


def _load_export(source: Source) -> Any:
    programs = _programs(source)
    only = next(iter(programs)) if len(programs) == 1 else "forward"
    method = source.method or only
    if method not in programs:
        names = ", ".join(sorted(programs))
        raise SourceError(f"source {source} has no method {method!r}; it has {names or 'none'}")
    module = module_of(programs[method])
    vars(module)["meta"] = {OWN_SPEC: spec_of(programs[method])}
    return module


def _programs(source: Source) -> dict[str, Any]:
    """The programs of a .pt2 by name: torch.export.save names its one `model`; before torch 2.8 it
    wrote another archive format.

    Compiled libraries, which would run when loaded, are refused unless the source is trusted.
    """
    from torch.export.pt2_archive._package import load_pt2

    with zipfile.ZipFile(source.location) as archive:
        names = archive.namelist()
    compiled = [name for name in names if "/aotinductor/" in name]
    if not source.trust and (compiled or code_in(source.location)):
        code = compiled[0] if compiled else code_in(source.location)
        raise SourceError(
            f"source {source} contains {code}, which torch would run when it opens the file; save"
            " the exported program with program.example_inputs = None (torch.export.save), or add"
            f" {TRUST} if you know its origin",
            code="CP-TRUST",
        )
    if LEGACY in names:
        return {"model": torch.export.load(source.location)}
    return dict(load_pt2(source.location).exported_programs)


def _load_pickle(source: Source) -> Any:
    if not source.trust:
        raise SourceError(
            f"source {source} is a pickle and not trusted; add {TRUST}", code="CP-TRUST"
        )
    with on_path(source.search_path):
        return torch.load(source.location, map_location="cpu", weights_only=False)


SOURCE_LOADERS: Mapping[str, Callable[[Source], Any]] = {
    "python": _load_python,
    "torchscript": _load_torchscript,
    "export": _load_export,
    "pickle": _load_pickle,
    "transformers": load_transformers,
}
"""By the kind of source."""


def own_spec(model: nn.Module) -> InputSpec | None:
    """A loaded model's own input spec, which only exported programs have."""
    found: InputSpec | None = getattr(model, "meta", {}).get(OWN_SPEC)
    return found


def with_forward(module: ScriptModule, method: str) -> ScriptModule:
    """A ScriptModule whose `forward` is another method of the given one, with the same argument
    names, types and defaults.

    It shares weights and state, under `model.`. Other methods keep their names if TorchScript can
    write their arguments' types.

    Raises:
        ValueError: there is no such method.
    """
    methods: list[str] = sorted(module._c._method_names())
    if method not in methods:
        names = ", ".join(methods)
        raise ValueError(f"got method {method!r}, expected one of {names}")
    with torchscript_deprecations_silenced():
        wrapper = _wrapper(module)
        _delegate(wrapper, "forward", module, method)
        for other in methods:
            if other not in (method, "forward", "model"):
                with suppress(RuntimeError):
                    _delegate(wrapper, other, module, other)
    return wrapper


def _delegate(
    wrapper: ScriptModule,
    name: str,
    module: ScriptModule,
    method: str,
) -> None:
    """Define a method of the wrapper that calls one of the module's."""
    _, *arguments = module._c._get_method(method).schema.arguments
    parameters = []
    for argument in arguments:
        parameter = f"{argument.name}: {argument.type.annotation_str}"
        if argument.has_default_value():
            parameter += f"={_literal(argument.default_value)}"
        parameters.append(parameter)
    names = [argument.name for argument in arguments]
    _define(wrapper, name, parameters, f"{method}({', '.join(names)})")


def _define(
    wrapper: ScriptModule,
    name: str,
    parameters: Sequence[str],
    call: str,
) -> None:
    head = f"def {name}({', '.join(['self', *parameters])}):"
    wrapper.define(f"{head}\n    return self.model.{call}\n")


def flat_forward(module: ScriptModule, spec: InputSpec) -> ScriptModule:
    """A ScriptModule that takes the tensor inputs in order and calls the given one, with constants
    written into the call.

    Raises:
        RuntimeError: TorchScript does not accept such a call.
    """
    names = {tensor.name: f"tensors_{index}" for index, tensor in enumerate(spec.tensors)}
    arguments = []
    for item in spec.inputs:
        keyword = f"{item.name}=" if spec.style == "keyword" else ""
        arguments.append(keyword + _call_text(item, names))
    with torchscript_deprecations_silenced():
        wrapper = _wrapper(module)
        parameters = [f"{name}: Tensor" for name in names.values()]
        _define(wrapper, "forward", parameters, f"forward({', '.join(arguments)})")
    return wrapper


def _wrapper(module: ScriptModule) -> ScriptModule:
    """A ScriptModule without methods that holds another, in the same mode."""

    class Holder(nn.Module):
        """Holds the module.

        A new class each time: TorchScript shares one type, and so one `forward`, per class.
        """

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

    wrapper: ScriptModule = torch.jit.script(Holder(module))
    return wrapper.train(module.training)


def _call_text(item: InputItem, names: Mapping[str, str]) -> str:
    """TorchScript's source text of an input."""
    if isinstance(item, TensorSpec):
        return names[item.name]
    if isinstance(item, ConstantSpec):
        return _literal(item.value)
    parts = [_call_text(part, names) for part in item.items]
    if item.kind == "list":
        return f"[{', '.join(parts)}]"
    if item.kind == "tuple":
        return _tuple(parts)
    pairs = zip(item.keys, parts, strict=True)
    return f"{{{', '.join(f'{key!r}: {part}' for key, part in pairs)}}}"


def _tuple(parts: Sequence[str]) -> str:
    if len(parts) == 1:
        return f"({parts[0]},)"
    return f"({', '.join(parts)})"


def _literal(value: object) -> str:
    """TorchScript's source text of a default value."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, tuple):
        return _tuple([_literal(each) for each in value])
    if isinstance(value, torch.device):
        return f"torch.device('{value}')"
    return repr(value)
