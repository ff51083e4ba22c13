"""Sources: where a model comes from. Imports torch only to load one.

python:examples.models:ranker           a function that returns an nn.Module; called with the entry's args
torchscript:models/vad.jit              a TorchScript file; `method` names another method than forward
export:models/vit.pt2                   an ExportedProgram; `method` names one of several
pickle:models/old.pth                   a whole module written by torch.save; it may run any code, so only with `trust`
transformers:./bert-folder              a local folder, or the name of a model on a hub
transformers:BertConfig                 a config class (or a model class), with `weights: random` and a seed

A file may be a URL (https://, s3://, gs://), which is downloaded first (files/download.py). `mlflow:` is for catalogs: the pipeline
turns a model of a registry into one of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from freezer.errors import SourceError
from freezer.files.download import fetch, is_url

if TYPE_CHECKING:
    pass

Kind = Literal["python", "torchscript", "export", "pickle", "transformers", "mlflow"]
KINDS: tuple[Kind, ...] = ("python", "torchscript", "export", "pickle", "transformers")
FILE_KINDS: tuple[Kind, ...] = ("torchscript", "export", "pickle")

# How a remedy names a setting, to readers of a catalog and to users of the command.
RELATIVE_TO = "the catalog's folder (with `coldpress freeze`, the working directory)"
TRUST = "`trust: true` (with `coldpress freeze`, `--trust`)"


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
