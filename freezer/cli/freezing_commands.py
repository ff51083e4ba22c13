"""The command `coldpress freeze`: freeze one model."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from freezer.artifact.description import with_accuracy
from freezer.cli.arguments import (
    ClassOption,
    NoiseOption,
    answer_signals,
    exiting,
    say,
)
from freezer.codec import Json
from freezer.errors import FAILED, FreezeError, UsageError
from freezer.files import make_folder, scratch_folder
from freezer.hardware import device_class
from freezer.spec import (
    InputSpec,
    Limits,
    Objective,
    SamplingPolicy,
    declared_accuracy,
    declared_spec,
    limit_problem,
)

if TYPE_CHECKING:
    from freezer.freezing.freeze import FreezeOptions, FreezeResult
    from freezer.freezing.sources import Source

CAMPAIGN_LIMITS = ("timeout_s", "memory_gb")
"""Limits of the processes in which a campaign builds and judges."""

InputsOption = Annotated[
    str | None,
    Option(
        help='JSON, as in a catalog: \'{"x": {"shape": ["batch", 8]}}\', or a samples file. Not'
        " needed for exported programs."
    ),
]
DimsOption = Annotated[str, Option(help='Bounds of named dims: \'{"batch": {"max": 16}}\'.')]
ArgsOption = Annotated[str, Option(help="Arguments of the source: '{\"hidden\": 256}'.")]
TrustOption = Annotated[bool, Option("--trust", help="Allow pickles, which run code.")]
RecipeOption = Annotated[
    list[str] | None, Option(help="Recipe to try, or all. Repeatable. Default: auto.")
]


def freeze(
    source: Annotated[
        str | None,
        Argument(
            help="python:MODULE:FUNCTION, transformers:NAME, torchscript:, export: or pickle:FILE."
        ),
    ] = None,
    out: Annotated[Path | None, Option(help="Folder to write.")] = None,
    inputs: InputsOption = None,
    dims: DimsOption = "{}",
    name: Annotated[str, Option(help="Name of the model in the manifest.")] = "model",
    args: ArgsOption = "{}",
    method: Annotated[
        str | None, Option(help="Method to freeze, of a file with several. Default: forward.")
    ] = None,
    sha256: Annotated[str | None, Option(help="Expected SHA-256 of the file.")] = None,
    trust: TrustOption = False,
    device_class_: ClassOption = "auto",
    threads: Annotated[
        list[int] | None,
        Option(
            help="Thread count to freeze for; the first decides. Repeatable. Default: torch's, and"
            " the powers of two below."
        ),
    ] = None,
    point: Annotated[
        list[str] | None,
        Option(help="Sizes for a dedicated payload: batch=8,length=128. Repeatable."),
    ] = None,
    recipe: RecipeOption = None,
    objective: Annotated[
        Objective,
        Option(help="What the artifact should be best in; docs/reference/contract.md."),
    ] = "p50",
    limit: Annotated[
        list[str] | None,
        Option(
            help="Limit that the artifact must meet: size_mb_max=100. Repeatable."
            " docs/reference/catalog.md lists them.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        Option(
            help="Lower precision to try: bf16, int8; on GPUs bf16, fp16, tf32. Repeatable. Needs"
            " --accuracy."
        ),
    ] = None,
    accuracy: Annotated[
        list[str] | None,
        Option(
            help="Budget of a lower precision: samples=FILE, top1_agreement_min=0.99. Repeatable."
            " docs/guides/lower-precision.md.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    preserve: Annotated[
        list[str] | None, Option(help="Attribute or method to keep: sub.version. Repeatable.")
    ] = None,
    reset: Annotated[str | None, Option(help="Method that resets the model's state.")] = None,
    device: Annotated[
        str | None, Option(help="GPU to freeze on: cuda, cuda:1. Default: the CPU.")
    ] = None,
    accept_noise: NoiseOption = False,
    resume: Annotated[
        Path | None,
        Option(
            help="Repeat the timing of an earlier freeze whose verdict was unstable: its --out. Its"
            " other options are used again.",
            metavar="OUT",
        ),
    ] = None,
) -> None:
    """Freeze one model for this machine, without Ray."""
    given = dict(locals())
    if resume is not None:
        given = _given_before(resume)
        freeze(**given | {"out": resume, "accept_noise": accept_noise or given["accept_noise"]})
        return
    if source is None or out is None:
        raise UsageError("expected SOURCE and --out, or --resume OUT")
    spec, samples = inputs_of(inputs, dims)
    source_args = parsed_json(args, "args")
    limits = _limits(limit or ())
    points = [_point(text) for text in point or ()]
    if device_class_ != "auto":  # before torch is imported
        os.environ.update(device_class(device_class_).limits)
    from freezer.freezing.freeze import FreezeOptions
    from freezer.freezing.sources import parse_source

    origin = parse_source(
        source,
        folder=Path.cwd(),
        search_path=(str(Path.cwd()),),
        args=source_args,
        method=method,
        sha256=sha256,
        trust=trust,
    )
    options = FreezeOptions(
        name=name,
        recipes=recipe or ("auto",),
        device_class=device_class_,
        num_threads=threads,
        points=points,
        preserve=preserve or (),
        objective=objective,
        limits=limits,
        precision=tuple(precision or ()),
        accuracy=declared_accuracy(_named(accuracy)) if accuracy else None,
        reset=reset,
        device=device,
        policy=SamplingPolicy(accept_noise=accept_noise),
    )
    answer_signals("the same command starts again")
    with exiting(interrupted=f"interrupted; {out} is not written"):
        result = _freeze(origin, options, spec, samples, out)
    _print_result(result)
    if result.verdict == "unstable":
        _given_file(out).write_text(json.dumps(given, default=str))
        say(f"to repeat only the timing: coldpress freeze --resume {out}")
    if result.artifact is None or result.verdict == "unstable":
        sys.exit(FAILED)


def _given_file(out: Path) -> Path:
    """The file with the options of a freeze whose builds are kept."""
    from freezer.freezing.candidates import OPTIONS, builds_of

    return builds_of(out) / OPTIONS


def _given_before(out: Path) -> Json:
    """The options of the freeze that kept its builds beside a folder."""
    file = _given_file(out)
    if not file.is_file():
        raise UsageError(
            f"--resume {out}: {file} is missing; expected the --out of a freeze whose verdict was"
            " unstable"
        )
    given: Json = json.loads(file.read_text())
    return given


def _freeze(
    source: Source,
    options: FreezeOptions,
    spec: InputSpec | None,
    samples: Path | None,
    out: Path,
) -> FreezeResult:
    """Freeze a model; on an error, write it in full beside OUT."""
    from freezer.freezing.candidates import check_out
    from freezer.freezing.freeze import freeze_source
    from freezer.freezing.packaging import evidence_of
    from freezer.freezing.sources import fetched

    check_out(out, "--out")
    with scratch_folder() as cache:
        local = fetched(source, cache)
        try:
            return freeze_source(
                local,
                spec=spec,
                samples=samples,
                out=out,
                options=options,
            )
        except FreezeError as error:
            errors = evidence_of(out) / "errors.txt"
            make_folder(errors.parent)
            errors.write_text("".join(traceback.format_exception(error)))
            error.add_note(f"full error: {errors}")
            raise


def _print_result(result: FreezeResult) -> None:
    """Print the verdict, the failures, the warnings of the capture, and what was written."""
    if result.verdict != "failed":  # whose reason has them
        for recipe, reason in result.failures.items():
            say(f"{recipe} was not built: {reason}")
    written = result.artifact and result.artifact.manifest
    verdict = with_accuracy(result.verdict, written.accuracy if written else None)
    say(f"{verdict}: {result.reason}")
    if result.evidence is not None:
        say(f"evidence and full errors: {result.evidence}")
    if result.artifact is not None:
        manifest = result.artifact.manifest
        for warning in manifest.freezing.warnings:
            say(f"warning: {warning}", "yellow")
        say(f"wrote {result.artifact.folder}, made for {manifest.device_class}")


def inputs_of(inputs: str | None, dims: str) -> tuple[InputSpec | None, Path | None]:
    """The declared spec or the samples file of --inputs."""
    if not inputs:
        return None, None
    if inputs.endswith((".safetensors", ".npz")):
        return None, Path(inputs)
    return declared_spec(
        parsed_json(inputs, "inputs", dict | list), parsed_json(dims, "dims")
    ), None


def _point(text: str) -> dict[str, int]:
    """Parse `batch=8,length=128`."""
    try:
        sizes = dict(part.split("=") for part in text.split(","))
        return {name.strip(): int(size) for name, size in sizes.items()}
    except ValueError:
        raise UsageError(
            f"--point {text!r}: expected one size per dim: batch=8,length=128"
        ) from None


def _limits(options: Sequence[str]) -> Limits:
    """Parse the limits `size_mb_max=100`, and check them as those of a catalog."""
    limits = _named(options)
    for text in options:
        name = text.partition("=")[0]
        problem = limit_problem(name, limits[name])
        if name in CAMPAIGN_LIMITS:
            problem = f"only campaigns apply {name}; remove it, or write a catalog"
        if problem:
            raise UsageError(f"--limit {text!r}: {problem}")
    return Limits(**limits)


def _named(options: Sequence[str]) -> Json:
    """Parse options of the form NAME=VALUE, of which numbers become such."""
    named: Json = {}
    for text in options:
        name, _, value = text.partition("=")
        named[name] = value
        with suppress(ValueError):
            named[name] = float(value)
    return named


def parsed_json(text: str, option: str, kind: type | UnionType = dict) -> Any:
    """Parse the JSON of an option."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--{option} {text!r} is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise UsageError(f"--{option} {text!r}: expected a JSON object")
    return value
