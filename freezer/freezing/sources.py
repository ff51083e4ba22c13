"""Sources: where a model comes from, and the Python modules that sources name. Imports no torch.

python:examples.models:ranker     a function that returns an nn.Module; called with the entry's args
torchscript:models/vad.jit            a TorchScript file; `method` names another method than forward
export:models/vit.pt2                   an ExportedProgram; `method` names one of several
pickle:models/old.pth     a whole module of torch.save; it may run any code: only with `trust`
transformers:./bert-folder              a local folder, or the name of a model on a hub
transformers:BertConfig         a config class (or a model class), with `weights: random` and a seed

A file may be a URL (https://, s3://, gs://), which is downloaded first (files/download.py).
`mlflow:` is for catalogs: the pipeline resolves a model of a registry to one of these.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from freezer.codec import JsonView, frozen
from freezer.errors import SourceError, described, without_credentials
from freezer.files import fetch, is_url

SourceKind = Literal["python", "torchscript", "export", "pickle", "transformers", "mlflow"]
KINDS: tuple[SourceKind, ...] = ("python", "torchscript", "export", "pickle", "transformers")
FILE_KINDS: tuple[SourceKind, ...] = ("torchscript", "export", "pickle")
CODE_KINDS = ("python", "transformers")
"""Their code may give other weights on another platform."""

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

# How a remedy names a setting, for readers of a catalog and users of the command.
RELATIVE_TO = "the catalog's folder (with `coldpress freeze`, the working directory)"
TRUST = "`trust: true` (with `coldpress freeze`, `--trust`)"


@frozen
class Source:
    """Where a model comes from, with all settings that affect it.

    Attributes:
        kind: one of KINDS; or `mlflow`, which the pipeline resolves to one of them.
        location: what follows the kind: `module:function`, an absolute path or a URL, a hub name, a
            class name.
        args: keyword arguments of a factory, or of a transformers config.
        weights: `random` makes a transformers model from a config class; None loads weights.
        seed: seed of random weights, and of torch while a factory runs.
        method: method of a TorchScript module or a .pt2 archive, if not `forward`.
        trust: allow the source to run code: pickles, and a hub's own code.
        sha256: expected SHA-256 of the file, in hexadecimal; None skips the check.
        search_path: folders to search for Python modules before sys.path.
        origin: the source as requested, if it was resolved to this one.
    """

    kind: SourceKind
    location: str
    args: JsonView = field(default_factory=dict)
    weights: Literal["random"] | None = None
    seed: int = 0
    method: str | None = None
    trust: bool = False
    sha256: str | None = None
    search_path: tuple[str, ...] = ()
    origin: str | None = None

    def __str__(self) -> str:
        return self.origin or without_credentials(f"{self.kind}:{self.location}")


def parse_source(text: str, *, folder: Path, **settings: Any) -> Source:
    """Parse the text of a source. Fetches nothing.

    Args:
        text: as in the module's docstring.
        folder: folder of the catalog, or the working directory; file paths are relative to it.
        settings: the other attributes of Source.

    Raises:
        SourceError: the kind is unknown, the location is missing, a file does not exist, a setting
            is not for this kind, or a pickle is not trusted.
    """
    kind, _, location = text.partition(":")
    known = next((known for known in KINDS if known == kind), None)
    if known is None or not location:
        kinds = ", ".join(f"{kind}:…" for kind in KINDS)
        raise SourceError(f"got {text!r}, expected {kinds}, as in torchscript:model.pt")
    if kind == "python" and (location.count(":") != 1 or not all(location.split(":"))):
        raise SourceError(f"got {text!r}, expected python:MODULE:FUNCTION")
    source = Source(kind=known, location=location, **settings)
    _check_settings(source)
    return replace(source, location=_location(source, folder))


def _location(source: Source, folder: Path) -> str:
    """The location of a source, absolute if it is a file or folder.

    Raises:
        SourceError: the file or folder does not exist.
    """
    if source.kind == "python" or is_url(source.location):
        return source.location
    path = (folder / source.location).resolve()
    of_transformers = source.kind == "transformers"
    exists = path.is_dir() if of_transformers else path.is_file()
    if exists:
        return str(path)
    if of_transformers and _HUB_NAME.fullmatch(source.location):
        return source.location
    raise SourceError(f"{path} does not exist; paths are relative to {RELATIVE_TO}")


def _check_settings(source: Source) -> None:
    given = {
        "args": (source.args, ("python", "transformers")),
        "weights": (source.weights, ("transformers",)),
        "method": (source.method, ("torchscript", "export")),
        "sha256": (source.sha256, FILE_KINDS),
    }
    for name, (value, kinds) in given.items():
        if value and source.kind not in kinds:
            raise SourceError(
                f"{name!r} is for {' and '.join(kinds)} sources, and this is {source.kind};"
                " remove it"
            )
    if source.kind == "pickle" and not source.trust:
        raise SourceError(
            f"{source.location} is a pickle, which runs code when it is loaded; add {TRUST} if you"
            " know its origin, or save it with torch.export.save",
            code="CP-TRUST",
        )


def fetched(source: Source, folder: Path) -> Source:
    """The source with its file downloaded to a folder, if it is a URL.

    Raises:
        SourceError, IntegrityError: the download fails, or the file is not the pinned one.
    """
    if source.kind not in FILE_KINDS or not is_url(source.location):
        return source
    return replace(
        source,
        location=str(fetch(source.location, folder, sha256=source.sha256)),
        origin=str(source),
    )


def find_function(location: str, search_path: Sequence[str]) -> Callable[..., Any]:
    """Import the function that `MODULE:FUNCTION` names.

    Raises:
        SourceError: the module cannot be imported, or has no such function.
    """
    module_name, _, function_name = location.partition(":")
    with on_path(search_path):
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            problem = f"module {module_name!r} cannot be imported: {described(error)}"
            raise SourceError(problem) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise SourceError(f"module {module_name!r} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


def module_file(module_name: str, search_path: Sequence[str]) -> Path | None:
    """The file of a module, found without importing anything; None if there is none."""
    folders: Sequence[str] = [*search_path, *sys.path]
    origin = None
    for part in module_name.split("."):  # find_spec of the dotted name would import its packages
        spec = PathFinder.find_spec(part, folders)
        if spec is None:
            return None
        origin, folders = spec.origin, spec.submodule_search_locations or ()
    return Path(origin) if origin else None


@contextmanager
def on_path(folders: Sequence[str]) -> Iterator[None]:
    """Search these folders for modules first."""
    added = [folder for folder in folders if folder not in sys.path]
    sys.path[:0] = added
    try:
        yield
    finally:
        for folder in added:
            with suppress(ValueError):
                sys.path.remove(folder)
