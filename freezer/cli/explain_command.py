"""The command `coldpress explain`: where the drift of a recipe enters."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freezer.artifact import GOLDEN_INPUTS, Artifact, folder_of
from freezer.cli.arguments import StoreOption, say
from freezer.cli.freezing_commands import (
    ArgsOption,
    DimsOption,
    InputsOption,
    RecipeOption,
    TrustOption,
    inputs_of,
    parsed_json,
)
from freezer.cli.store_commands import pick
from freezer.errors import UsageError
from freezer.files import scratch_folder
from freezer.spec import InputSpec
from freezer.store import Store

if TYPE_CHECKING:
    from freezer.artifact import Explanation
    from freezer.freezing.freeze import FreezeOptions
    from freezer.freezing.sources import Source

ExplainedArgument = Annotated[
    str, typer.Argument(help="A SOURCE as of freeze, an artifact folder, or MODEL[:VERSION].")
]


def explain(
    model: ExplainedArgument,
    recipe: RecipeOption = None,
    inputs: InputsOption = None,
    dims: DimsOption = "{}",
    args: ArgsOption = "{}",
    trust: TrustOption = False,
    store: StoreOption = "./store",
    out: Annotated[
        Path | None, typer.Option(help="Folder to write plots and files that reproduce the error.")
    ] = None,
) -> None:
    """Explain at which stage and operator the drift of a recipe enters."""
    from freezer.freezing.freeze import FreezeOptions
    from freezer.freezing.sources import parse_source

    folder, source = _artifact_of(model, store)
    spec, samples = inputs_of(inputs, dims)
    recipes: Sequence[str] = recipe or ("auto",)
    if folder is not None:
        manifest = folder.manifest
        source = manifest.provenance.get("source", "")
        samples = samples or folder.folder / GOLDEN_INPUTS
        spec = spec or manifest.inputs
        recipes = recipe or (manifest.recipe.name,)
    origin = parse_source(
        source,
        folder=Path.cwd(),
        search_path=(str(Path.cwd()),),
        args=parsed_json(args, "args"),
        trust=trust,
    )
    for explanation in _explained(origin, spec, samples, FreezeOptions(recipes=recipes), out):
        say(explanation.text())
        if out is not None:
            (out / f"{explanation.recipe}.svg").write_text(explanation.svg())


def _artifact_of(model: str, store: str) -> tuple[Artifact | None, str]:
    """The artifact that a folder or a model of a store names; or None and the source."""
    folder = folder_of(model)
    if folder is not None:
        return Artifact.read(folder), ""
    kind, colon, rest = model.partition(":")
    if colon and not rest.isdigit() and rest != "latest":
        return None, model
    opened = Store.open(store)
    version = opened.version(model)
    pulled = Path(tempfile.mkdtemp(prefix="coldpress-")) / kind
    return opened.pull(version, pick(version, "auto"), pulled), ""


def _explained(
    source: Source,
    spec: InputSpec | None,
    samples: Path | None,
    options: FreezeOptions,
    out: Path | None,
) -> Iterator[Explanation]:
    """Explain each recipe, with the first input set."""
    from freezer.freezing.drift import run_reference
    from freezer.freezing.environment import installed_versions
    from freezer.freezing.explaining import explain_recipe
    from freezer.freezing.freeze import freeze_target, load_subject
    from freezer.freezing.recipes import select
    from freezer.freezing.sources import fetched
    from freezer.freezing.target import resolve_device

    device_class_, device = resolve_device(None, options.device_class, options.device)
    selected = select(options.recipes, portable=False, installed=installed_versions())
    with scratch_folder() as cache:
        local = fetched(source, Path(cache))
        subject = load_subject(local, "model", spec, samples, options.for_subject(device))
        target = freeze_target(subject, device_class_, device, options)
        reference = run_reference(subject)
        if reference.stateful or not reference.deterministic:
            raise UsageError("explain: the model keeps state or draws random numbers")
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        for recipe in selected:
            file = None if out is None else out / f"{recipe.name}.py"
            call = reference.singles[0]
            yield explain_recipe(subject, recipe.name, target, call, reproduction=file)
