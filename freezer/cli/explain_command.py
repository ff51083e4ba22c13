"""The command `coldpress explain`: where the drift of a recipe enters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

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
from freezer.codec import Json
from freezer.errors import UsageError
from freezer.files import make_folder, scratch_folder
from freezer.spec import InputSpec
from freezer.store import Store

if TYPE_CHECKING:
    from freezer.artifact.explanation import Explanation
    from freezer.freezing.sources import Source


def explain(
    model: Annotated[
        str, Argument(help="A SOURCE as of freeze, an artifact folder, or MODEL[:VERSION].")
    ],
    recipe: RecipeOption = None,
    inputs: InputsOption = None,
    dims: DimsOption = "{}",
    args: ArgsOption = "{}",
    trust: TrustOption = False,
    store: StoreOption = "./store",
    out: Annotated[
        Path | None, Option(help="Folder to write plots and files that reproduce the error.")
    ] = None,
) -> None:
    """Explain at which stage and operator the drift of a recipe enters, with the first input set.

    An artifact is explained by its golden inputs, and the source that it was made from.
    """
    from freezer.freezing.capture import REPAIRS

    spec, samples = inputs_of(inputs, dims)
    with scratch_folder() as folder:
        artifact = _artifact_of(model, store, folder / "artifact")
        if artifact is not None:
            samples = samples or artifact.folder / GOLDEN_INPUTS
            spec = spec or artifact.manifest.inputs
            recipe = recipe or [artifact.manifest.recipe.name]
            model = _source_of(artifact)
            if repairs := artifact.manifest.recipe.settings.get(REPAIRS):
                say(f"without the repair that the artifact has ({repairs}):")
        source = _parsed(model, parsed_json(args, "args"), trust)
        for explanation in _explained(source, spec, samples, recipe or ["auto"], out):
            say(explanation.text())
            if out is not None:
                (out / f"{explanation.recipe}.svg").write_text(explanation.svg())


def _parsed(text: str, args: Json, trust: bool) -> Source:
    from freezer.freezing.sources import parse_source

    here = Path.cwd()
    return parse_source(
        text,
        folder=here,
        search_path=(str(here),),
        args=args,
        trust=trust,
    )


def _artifact_of(model: str, store: str, folder: Path) -> Artifact | None:
    """The artifact that a folder or a model of a store names; None for a source."""
    from freezer.freezing.sources import KINDS

    given = folder_of(model)
    if given is not None:
        return Artifact.read(given)
    kind, colon, _ = model.partition(":")
    if colon and kind in KINDS:
        return None
    opened = Store.open(store)
    version = opened.version(model)
    return opened.pull(version, pick(version, "auto"), folder)


def _source_of(artifact: Artifact) -> str:
    from freezer.freezing.sources import KINDS

    source = str(artifact.manifest.provenance.get("source", ""))
    if source.partition(":")[0] not in KINDS:
        raise UsageError(
            f"{artifact.folder} was made from a model in memory ({source}); expected its SOURCE:"
            " coldpress explain python:MODULE:FUNCTION --inputs ..."
        )
    return source


def _explained(
    source: Source,
    spec: InputSpec | None,
    samples: Path | None,
    recipes: Sequence[str],
    out: Path | None,
) -> Iterator[Explanation]:
    """Explain each recipe, with the first input set."""
    from freezer.freezing.choices import select
    from freezer.freezing.drift import run_reference
    from freezer.freezing.environment import installed_versions
    from freezer.freezing.explaining import explain_recipe
    from freezer.freezing.freeze import FreezeOptions, freeze_target, load_subject
    from freezer.freezing.sources import fetched
    from freezer.freezing.target import resolve_device

    options = FreezeOptions(recipes=recipes)
    device_class_, device = resolve_device(None, options.device_class, options.device)
    selected = select(options.recipes, portable=False, installed=installed_versions())
    with scratch_folder() as cache:
        local = fetched(source, cache)
        subject = load_subject(local, "model", spec, samples, options.for_subject(device))
        target = freeze_target(subject, device_class_, device, options)
        reference = run_reference(subject)
        if reference.stateful or not reference.deterministic:
            raise UsageError("explain: the model keeps state or draws random numbers")
        if out is not None:
            make_folder(out)
        for recipe in selected:
            file = None if out is None else out / f"reproduce-{recipe.name}.py"
            call = reference.singles[0]
            yield explain_recipe(subject, recipe.name, target, call, reproduction=file)
