"""Sources: where a model comes from. `python:`, `torchscript:` and `transformers:`. Imports torch only to load one.

python:examples.models:ranker           a function that returns an nn.Module; called with the entry's args
torchscript:models/vad.jit              a TorchScript file
transformers:./bert-folder              a local folder, or the name of a model on a hub
transformers:BertConfig                 a config class (or a model class), with `weights: random` and a seed
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from freezer.errors import MissingDependencyError, SourceError
from freezer.legacy import torchscript_deprecations_silenced

if TYPE_CHECKING:
    from torch import nn

KINDS = ("python", "torchscript", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a model comes from, with all that settles what comes from there.

    Attributes:
        kind: one of KINDS.
        location: what follows the kind: `module:function`, an absolute path, a hub name, a class name.
        args: keyword arguments of a factory, or of a transformers config.
        weights: `random` makes a transformers model from a config class; None loads weights.
        seed: of random weights, and of torch while a factory runs.
        search_path: folders in which python modules are looked for, before sys.path.
    """

    kind: Literal["python", "torchscript", "transformers"]
    location: str
    args: Mapping[str, Any] = field(default_factory=dict)
    weights: Literal["random"] | None = None
    seed: int = 0
    search_path: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}:{self.location}"


def parse_source(text: str, *, folder: Path, **settings: Any) -> Source:
    """The source that a text names; paths are relative to `folder`.

    Args:
        text: as in the module's docstring.
        folder: of the catalog, or the working directory.
        settings: the other attributes of Source.

    Raises:
        SourceError: the kind is unknown, or nothing follows it.
    """
    kind, colon, location = text.partition(":")
    if not colon or kind not in KINDS or not location:
        raise SourceError(f"source {text!r}: expected {', '.join(f'{k}:…' for k in KINDS)}")
    if kind == "python" and location.count(":") != 1:
        raise SourceError(f"source {text!r}: expected python:MODULE:FUNCTION")
    if kind == "torchscript":
        location = str((folder / location).resolve())
        if not Path(location).is_file():
            raise SourceError(f"source {text!r}: {location} is not there; paths are relative to the catalog's folder")
    if kind == "transformers" and (folder / location).is_dir():
        location = str((folder / location).resolve())
    return Source(kind=kind, location=location, **settings)  # type: ignore[arg-type]


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
        "transformers": _load_transformers,
    }
    torch.manual_seed(source.seed)
    try:
        model = loaders[source.kind](source)
    except (SourceError, MissingDependencyError):
        raise
    except Exception as error:
        raise SourceError(f"source {source}: {type(error).__name__}: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise SourceError(f"source {source} gave a {type(model).__name__}; expected an nn.Module")
    return model.eval()


def _load_python(source: Source) -> Any:
    factory = find_function(source.location, source.search_path)
    with _on_path(source.search_path):  # a factory may import its neighbours when it is called
        return factory(**source.args)


def _load_torchscript(source: Source) -> Any:
    import torch

    with torchscript_deprecations_silenced():
        return torch.jit.load(source.location, map_location="cpu")


def _load_transformers(source: Source) -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError(f"source {source} needs transformers; pip install 'coldpress[pipeline]'") from None
    if source.weights != "random":
        config = transformers.AutoConfig.from_pretrained(source.location)
        named = (getattr(config, "architectures", None) or [None])[0]
        factory = getattr(transformers, named, None) if named else None
        return (factory or transformers.AutoModel).from_pretrained(source.location, **source.args)
    found = getattr(transformers, source.location, None)
    if found is None:
        raise SourceError(f"source {source}: transformers {transformers.__version__} has no class {source.location!r}")
    if issubclass(found, transformers.PreTrainedConfig):
        return transformers.AutoModel.from_config(found(**source.args))
    return found(found.config_class(**source.args))


def find_function(location: str, search_path: Sequence[str]) -> Callable[..., Any]:
    """The function that `MODULE:FUNCTION` names.

    Raises:
        SourceError: there is no such module or function, or the module cannot be imported.
    """
    module_name, _, function_name = location.partition(":")
    with _on_path(search_path):
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise SourceError(f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = ", ".join(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise SourceError(f"module {module_name!r} has no function {function_name!r}; it has: {known or 'none'}")
    return function  # type: ignore[no-any-return]


def module_file(module_name: str, search_path: Sequence[str]) -> Path | None:
    """The file of a module, found without importing anything; None when there is none."""
    folders: Sequence[str] | None = [*search_path, *sys.path]
    spec = None
    parts = module_name.split(".")
    for index in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: index + 1]), folders)
        if spec is None:
            return None
        folders = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin else None


@contextlib.contextmanager
def _on_path(folders: Sequence[str]) -> Iterator[None]:
    added = [folder for folder in folders if folder not in sys.path]
    sys.path[:0] = added
    try:
        yield
    finally:
        for folder in added:
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)


def weights_digest(model: nn.Module) -> str:
    """`sha256:` over names, dtypes, shapes and bytes of all parameters and buffers, in the order of their names."""
    import torch

    digest = hashlib.sha256()
    tensors = {**dict(model.named_buffers()), **model.state_dict()}  # state_dict leaves buffers out that are not persistent
    for name, tensor in sorted(tensors.items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if tensor.numel():
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(raw.numpy().data)
    return f"sha256:{digest.hexdigest()}"
