"""Load a source: a Python function, TorchScript, an exported program, a pickle or a transformers
model.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from freezer.errors import MissingDependencyError, SourceError, first_line
from freezer.files import digest_file, is_url
from freezer.freezing.models.exported_program import module_of, spec_of
from freezer.freezing.models.torchscript_module import with_forward
from freezer.freezing.sources import TRUST, Source, find_function, on_path
from freezer.runtime.loaders import LEGACY, code_in, torchscript_deprecations_silenced
from freezer.spec import InputSpec

OWN_SPEC = "coldpress.inputs"
"""The key of a loaded model's own input spec in the `meta` of its graph."""


def load_source(source: Source) -> nn.Module:
    """Load the model onto the CPU, in eval mode.

    Raises:
        SourceError: it cannot be loaded, or is not an nn.Module.
        MissingDependencyError: the kind needs a package that is not installed.
    """
    if source.kind not in SOURCE_LOADERS:
        raise SourceError(
            f"source {source}: {source.kind} sources are for catalogs; use `coldpress optimize`"
        )
    _check_digest(source)
    torch.manual_seed(source.seed)
    try:
        model = SOURCE_LOADERS[source.kind](source)
    except (SourceError, MissingDependencyError):
        raise
    except Exception as error:
        raise SourceError(
            f"source {source}: {type(error).__name__}: {first_line(error)}"
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise SourceError(
            f"source {source} returned a {type(model).__name__}, expected an nn.Module; return the"
            " model itself"
        )
    return model.eval()


def _check_digest(source: Source) -> None:
    """Check a file against the pinned digest before anything opens it."""
    if source.sha256 is None or is_url(source.location):
        return
    path = Path(source.location)
    sha256 = digest_file(path).removeprefix("sha256:")
    if sha256 != source.sha256:
        raise SourceError(
            f"source {source}: got sha256 {sha256}, expected {source.sha256}; the file is not the"
            " pinned one, or has changed",
            code="CP-FETCH-DIGEST",
        )


def _load_python(source: Source) -> Any:
    factory = find_function(source.location, source.search_path)
    with on_path(source.search_path):  # a factory may import modules beside it
        return factory(**source.args)


def _load_torchscript(source: Source) -> Any:
    with torchscript_deprecations_silenced():
        module = torch.jit.load(source.location, map_location="cpu")
        if source.method is not None:
            try:
                module = with_forward(module, source.method)
            except ValueError as error:
                raise SourceError(f"source {source}: {error}") from error
    return module


def _load_export(source: Source) -> Any:
    programs = _programs(source)
    if source.method:
        method = source.method
    elif len(programs) == 1:
        method = next(iter(programs))
    else:
        method = "model" if "model" in programs else "forward"
    if method not in programs:
        names = ", ".join(sorted(programs))
        raise SourceError(f"source {source} has no method {method!r}; it has {names or 'none'}")
    program = programs[method]
    module = module_of(program)
    vars(module)["meta"] = {OWN_SPEC: spec_of(program)}
    return module


def _programs(source: Source) -> dict[str, Any]:
    """The programs of a .pt2 by name: torch.export.save names its one `model`; before torch 2.8 it
    wrote another archive format.

    Compiled libraries, which would run when loaded, are refused unless the source is trusted.
    """
    from torch.export.pt2_archive._package import load_pt2

    try:
        with zipfile.ZipFile(source.location) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        raise SourceError(
            f"source {source} is not a .pt2 archive: {error}; write it with torch.export.save"
        ) from error
    compiled = next((name for name in names if "/aotinductor/" in name), None)
    if compiled is not None and not source.trust:
        raise SourceError(
            f"source {source} holds compiled code ({compiled}), which would run when loaded; give"
            f" the exported program (torch.export.save), or add {TRUST}",
            code="CP-TRUST",
        )
    code = None if source.trust else code_in(source.location)
    if code:
        raise SourceError(
            f"source {source} contains {code}, which torch would run when it opens the file; save"
            f" it again with program.example_inputs = None (torch.export.save), or add {TRUST} if"
            " you know its origin",
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


def _load_transformers(source: Source) -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError(
            f"source {source} needs transformers; pip install transformers"
        ) from None
    if source.weights != "random":
        remote_code = {"trust_remote_code": source.trust}
        config = transformers.AutoConfig.from_pretrained(source.location, **remote_code)
        named = (getattr(config, "architectures", None) or [None])[0]
        factory = getattr(transformers, named, None) if named else None
        if factory is None:
            return transformers.AutoModel.from_pretrained(
                source.location, **remote_code, **source.args
            )
        return factory.from_pretrained(source.location, **source.args)
    found = getattr(transformers, source.location, None)
    if found is None:
        raise SourceError(
            f"source {source}: transformers {transformers.__version__} has no class"
            f" {source.location!r}"
        )
    if issubclass(found, transformers.PreTrainedConfig):
        return transformers.AutoModel.from_config(found(**source.args))
    return found(found.config_class(**source.args))


SOURCE_LOADERS: Mapping[str, Callable[[Source], Any]] = {
    "python": _load_python,
    "torchscript": _load_torchscript,
    "export": _load_export,
    "pickle": _load_pickle,
    "transformers": _load_transformers,
}
"""By the kind of source."""


def own_spec(model: nn.Module) -> InputSpec | None:
    """A loaded model's own input spec, which only exported programs have."""
    found: InputSpec | None = getattr(model, "meta", {}).get(OWN_SPEC)
    return found
