"""Sources: where a model comes from. Imports torch only to load one.

python:examples.models:ranker           a function that returns an nn.Module; called with the entry's args
torchscript:models/vad.jit              a TorchScript file; `method` names another method than forward
export:models/vit.pt2                   an ExportedProgram; `method` names one of several
pickle:models/old.pth                   a whole module written by torch.save; it may run any code, so only with `trust`
transformers:./bert-folder              a local folder, or the name of a model on a hub
transformers:BertConfig                 a config class (or a model class), with `weights: random` and a seed

A file may be a URL (https://, s3://, gs://), which is fetched first (fetch.py). `mlflow:` is for catalogs: pipeline/ turns a model
of a registry into one of these.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from freezer.errors import MissingDependencyError, SourceError
from freezer.fetch import fetch, is_url
from freezer.legacy import torchscript_deprecations_silenced
from freezer.python_modules import find_function, on_path

if TYPE_CHECKING:
    from torch import nn

    from freezer.spec import InputSpec

Kind = Literal["python", "torchscript", "export", "pickle", "transformers", "mlflow"]
KINDS: tuple[Kind, ...] = ("python", "torchscript", "export", "pickle", "transformers")
FILE_KINDS: tuple[Kind, ...] = ("torchscript", "export", "pickle")

# How a remedy names a setting, to readers of a catalog and to users of the command.
RELATIVE_TO = "the catalog's folder (with `coldpress freeze`, the working directory)"
TRUST = "`trust: true` (with `coldpress freeze`, `--trust`)"

OWN_SPEC = "coldpress.inputs"
"""Where a loaded model keeps the inputs that it tells of itself, in the `meta` of its graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a model comes from, with all that settles what comes from there.

    Attributes:
        kind: one of KINDS; or `mlflow`, which pipeline/ turns into one of them.
        location: what follows the kind: `module:function`, an absolute path or a URL, a hub name, a class name.
        args: keyword arguments of a factory, or of a transformers config.
        weights: `random` makes a transformers model from a config class; None loads weights.
        seed: of random weights, and of torch while a factory runs.
        method: of a TorchScript module or a .pt2 archive, where it is not `forward`.
        trust: whether code in the source may run: pickles, and a hub's own code.
        sha256: of the file, in hexadecimal; None trusts what is there.
        search_path: folders in which python modules are looked for, before sys.path.
        origin: what was asked for, where the rest says what that led to.
    """

    kind: Kind
    location: str
    args: Mapping[str, Any] = field(default_factory=dict)
    weights: Literal["random"] | None = None
    seed: int = 0
    method: str | None = None
    trust: bool = False
    sha256: str | None = None
    search_path: tuple[str, ...] = ()
    origin: str | None = None

    def __str__(self) -> str:
        return self.origin or f"{self.kind}:{self.location}"


def parse_source(text: str, *, folder: Path, **settings: Any) -> Source:
    """The source that a text names; paths are relative to `folder`. Nothing is fetched.

    Args:
        text: as in the module's docstring.
        folder: of the catalog, or the working directory.
        settings: the other attributes of Source.

    Raises:
        SourceError: the kind is unknown, nothing follows it, a file is not there, or a pickle is not trusted.
    """
    kind, colon, location = text.partition(":")
    known = next((known for known in KINDS if known == kind), None)
    if not colon or known is None or not location:
        hint = f"; a file needs its kind before it, as in torchscript:{text}" if not colon or is_url(text) else ""
        raise SourceError(f"got {text!r}, expected {', '.join(f'{k}:…' for k in KINDS)}{hint}")
    if kind == "python" and (location.count(":") != 1 or not all(location.split(":"))):
        raise SourceError(f"got {text!r}, expected python:MODULE:FUNCTION")
    source = Source(kind=known, location=location, **settings)
    _check_settings(source)
    if known in FILE_KINDS and not is_url(location):
        location = str((folder / location).resolve())
        if not Path(location).is_file():
            raise SourceError(f"{location} is not there; paths are relative to {RELATIVE_TO}")
    elif kind == "transformers" and (folder / location).is_dir():
        location = str((folder / location).resolve())
    return replace(source, location=location)


def _check_settings(source: Source) -> None:
    """Hold the settings against the kind.

    Raises:
        SourceError: one of them says nothing to a source of this kind, or a pickle is not trusted.
    """
    given = {
        "args": (bool(source.args), ("python", "transformers")),
        "weights": (source.weights is not None, ("transformers",)),
        "method": (source.method is not None, ("torchscript", "export")),
        "sha256": (source.sha256 is not None, FILE_KINDS),
    }
    for name, (is_given, kinds) in given.items():
        if is_given and source.kind not in kinds:
            raise SourceError(f"{name!r} is for {' and '.join(kinds)} sources, and this is {source.kind}; remove it")
    if source.kind == "pickle" and not source.trust:
        raise SourceError(
            f"{source.location} is a pickle, which runs code when it is loaded; add {TRUST} if you know its origin, or save it "
            "with torch.export.save",
            code="CP-TRUST",
        )


def fetched(source: Source, folder: Path) -> Source:
    """The source with its file on this machine.

    Raises:
        SourceError, IntegrityError: the file cannot be fetched, or is not the pinned one.
    """
    if source.kind not in FILE_KINDS or not is_url(source.location):
        return source
    return replace(source, location=str(fetch(source.location, folder, sha256=source.sha256)), origin=str(source))


def load_source(source: Source) -> nn.Module:
    """The model, in eval mode, on the CPU.

    Raises:
        SourceError: it cannot be loaded, or is no nn.Module; the cause is chained.
        MissingDependencyError: the kind needs a package that is not installed.
    """
    import torch

    loaders: dict[str, Callable[[Source], Any]] = {
        "python": _load_python,
        "torchscript": _load_torchscript,
        "export": _load_export,
        "pickle": _load_pickle,
        "transformers": _load_transformers,
    }
    if source.kind not in loaders:
        raise SourceError(f"source {source}: {source.kind} sources are for catalogs; use `python -m jobs.optimize`")
    _check_digest(source)
    torch.manual_seed(source.seed)
    try:
        model = loaders[source.kind](source)
    except (SourceError, MissingDependencyError):
        raise
    except Exception as error:
        raise SourceError(f"source {source}: {type(error).__name__}: {_sentence(error)}") from error
    if not isinstance(model, torch.nn.Module):
        raise SourceError(
            f"source {source} gave a {type(model).__name__}, expected an nn.Module; return the model itself",
            code="CP-SOURCE-MODULE",
        )
    return model.eval()


def _check_digest(source: Source) -> None:
    """Hold a file against the digest that the entry pins, before anything opens it."""
    if source.sha256 is None or is_url(source.location):
        return
    with Path(source.location).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise SourceError(
            f"source {source}: got sha256 {found}, expected {source.sha256}; it is not what was pinned, or has changed since it "
            "was looked at",
            code="CP-FETCH-DIGEST",
        )


def _sentence(error: Exception) -> str:
    """The first line of a message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"


def _load_python(source: Source) -> Any:
    factory = find_function(source.location, source.search_path)
    with on_path(source.search_path):  # a factory may import its neighbours when it is called
        return factory(**source.args)


def _load_torchscript(source: Source) -> Any:
    import torch

    from freezer.torchscript_graph import cuda_constants, with_forward

    with torchscript_deprecations_silenced():
        module = torch.jit.load(source.location, map_location="cpu")
        if source.method is not None:
            try:
                module = with_forward(module, source.method)
            except ValueError as error:
                raise SourceError(f"source {source}: {error}", code="CP-SOURCE-METHOD") from error
        found = [] if torch.cuda.is_available() else cuda_constants(module)
    if found:
        raise SourceError(
            f"source {source} names the device {found[0]} in its graph, and this worker has no GPU; trace it again on a CPU, or "
            "take devices from the inputs (x.device)",
            code="CP-SOURCE-DEVICE",
        )
    return module


def _load_export(source: Source) -> Any:
    from freezer.exported_inputs import spec_of
    from freezer.exported_module import module_of

    _check_archive(source)
    with _no_pickles(source):
        programs = _programs(source.location)
    lone = next(iter(programs)) if len(programs) == 1 else "forward"
    wanted = source.method or next((name for name in ("model", "forward") if name in programs), lone)
    if wanted not in programs:
        raise SourceError(
            f"source {source} has no method {wanted!r}; it has {', '.join(sorted(programs)) or 'none'}", code="CP-SOURCE-METHOD"
        )
    module = module_of(programs[wanted])
    vars(module)["meta"] = {OWN_SPEC: spec_of(programs[wanted])}
    return module


def _programs(path: str) -> dict[str, Any]:
    """The programs of a .pt2 by name: torch.export.save calls its one `model`; before torch 2.8 it wrote another kind of zip."""
    import torch
    from torch.export.pt2_archive._package import load_pt2

    with zipfile.ZipFile(path) as archive:
        if "serialized_exported_program.json" in archive.namelist():
            return {"model": torch.export.load(path)}
    return dict(load_pt2(path).exported_programs)


def _check_archive(source: Source) -> None:
    """Refuse what would run code when it is loaded: compiled libraries.

    Raises:
        SourceError: the archive holds one, and is not trusted; or it is no archive.
    """
    try:
        with zipfile.ZipFile(source.location) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        raise SourceError(f"source {source} is no .pt2 archive: {error}; write it with torch.export.save") from error
    compiled = next((name for name in names if "/aotinductor/" in name), None)
    if compiled is not None and not source.trust:
        raise SourceError(
            f"source {source} holds compiled code ({compiled}), which loading it would run; give the exported program "
            f"(torch.export.save), or add {TRUST}",
            code="CP-TRUST",
        )


@contextlib.contextmanager
def _no_pickles(source: Source) -> Iterator[None]:
    """Let nothing be unpickled but tensors, unless the source is trusted; torch.export.load falls back to pickles by itself."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    if source.trust or name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    except Exception as error:
        if "weights_only" not in str(error).lower() and "weights only" not in str(error).lower():
            raise
        raise SourceError(
            f"source {source} holds pickled objects, which run code when they are loaded; add {TRUST} if you know its origin",
            code="CP-TRUST",
        ) from error
    finally:
        del os.environ[name]


def _load_pickle(source: Source) -> Any:
    import torch

    if not source.trust:
        raise SourceError(f"source {source} is a pickle, and is not trusted; add {TRUST}", code="CP-TRUST")
    with on_path(source.search_path):
        return torch.load(source.location, map_location="cpu", weights_only=False)


def _load_transformers(source: Source) -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError(f"source {source} needs transformers; pip install 'coldpress[pipeline]'") from None
    if source.weights != "random":
        remote_code = {"trust_remote_code": source.trust}
        config = transformers.AutoConfig.from_pretrained(source.location, **remote_code)
        named = (getattr(config, "architectures", None) or [None])[0]
        factory = getattr(transformers, named, None) if named else None
        if factory is None:
            return transformers.AutoModel.from_pretrained(source.location, **remote_code, **source.args)
        return factory.from_pretrained(source.location, **source.args)
    found = getattr(transformers, source.location, None)
    if found is None:
        raise SourceError(f"source {source}: transformers {transformers.__version__} has no class {source.location!r}")
    if issubclass(found, transformers.PreTrainedConfig):
        return transformers.AutoModel.from_config(found(**source.args))
    return found(found.config_class(**source.args))


def own_spec(model: nn.Module) -> InputSpec | None:
    """The inputs that a loaded model itself tells of: those of an exported program."""
    found: InputSpec | None = getattr(model, "meta", {}).get(OWN_SPEC)
    return found


def weights_digest(model: nn.Module) -> str:
    """`sha256:` over names, dtypes, shapes and bytes of all parameters, buffers and packed weights, in the order of their names."""
    from freezer.tensor_bytes import bytes_of, dense_parts, memory_of

    digest = hashlib.sha256()
    tensors = {**dict(model.named_buffers()), **model.state_dict()}  # state_dict leaves buffers out that are not persistent
    for name, value in sorted(tensors.items()):
        for tensor in dense_parts(value):
            digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            if tensor.numel():
                data = bytes_of(tensor)
                digest.update(memory_of(data))
    return f"sha256:{digest.hexdigest()}"
