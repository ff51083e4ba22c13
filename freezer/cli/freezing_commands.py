"""The command `coldpress freeze`: freeze one model, or check its eager run with `--debug`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from freezer.cli.arguments import REFUSED, ClassOption, console, say, table
from freezer.errors import FreezeError, UsageError
from freezer.files import check_folder
from freezer.hardware import device_class
from freezer.spec import Limits, Objective, SamplingPolicy, declared_spec, limit_problem

if TYPE_CHECKING:
    from freezer.freezing.freeze import FreezeResult
    from freezer.freezing.models import Subject

EXAMPLES = {
    "args": '{"hidden": 256}',
    "dims": '{"batch": {"min": 1, "max": 16}}',
    "inputs": '{"x": {"shape": ["batch", 8]}}',
}
"""A value of each option that takes JSON."""

INPUTS_HELP = (
    f"JSON, as in a catalog: '{EXAMPLES['inputs']}', or a samples file. Not needed for exported"
    " programs."
)

LIMIT_HELP = (
    "Limit that the artifact must keep: size_mb_max=100. Repeatable. docs/freeze-one-model.md lists"
    " them."
)

CAMPAIGN_LIMITS = ("timeout_s", "memory_gb")
"""Limits of the processes in which a campaign builds and judges."""


def freeze(
    source: Annotated[
        str,
        typer.Argument(
            help="python:MODULE:FUNCTION, transformers:NAME, torchscript:, export: or pickle:FILE."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder to write.")] = None,
    inputs: Annotated[str | None, typer.Option(help=INPUTS_HELP)] = None,
    dims: Annotated[str, typer.Option(help=f"Bounds of named dims: '{EXAMPLES['dims']}'.")] = "{}",
    name: Annotated[str, typer.Option(help="Name of the model in the manifest.")] = "model",
    args: Annotated[
        str, typer.Option(help=f"Arguments of the source: '{EXAMPLES['args']}'.")
    ] = "{}",
    weights: Annotated[
        Literal["random"] | None,
        typer.Option(help="Initialize a transformers model from its config."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random weights.")] = 0,
    method: Annotated[
        str | None, typer.Option(help="Method to freeze, of a file with several. Default: forward.")
    ] = None,
    sha256: Annotated[str | None, typer.Option(help="Expected SHA-256 of the file.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Allow pickles, which run code.")] = False,
    device_class_: ClassOption = "auto",
    threads: Annotated[
        list[int] | None,
        typer.Option(
            help=(
                "Thread count to freeze for; the first decides. Repeatable. Default: torch's, and"
                " the powers of two below."
            )
        ),
    ] = None,
    point: Annotated[
        list[str] | None,
        typer.Option(help="Sizes for a dedicated payload: batch=8,length=128. Repeatable."),
    ] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Recipe to try, or all. Repeatable. Default: auto.")
    ] = None,
    objective: Annotated[
        Objective, typer.Option(help="What the artifact should be best in; docs/contract.md.")
    ] = "p50",
    limit: Annotated[list[str] | None, typer.Option(help=LIMIT_HELP, metavar="NAME=VALUE")] = None,
    preserve: Annotated[
        list[str] | None, typer.Option(help="Attribute or method to keep: sub.version. Repeatable.")
    ] = None,
    reset: Annotated[str | None, typer.Option(help="Method that resets the model's state.")] = None,
    device: Annotated[
        str | None, typer.Option(help="GPU to freeze on: cuda, cuda:1. Default: the CPU.")
    ] = None,
    accept_noise: Annotated[
        bool,
        typer.Option(
            "--accept-noise",
            help="On a busy machine, publish what is faster even by disturbed measurements.",
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Only run and check the eager model, on the CPU; write nothing."
        ),
    ] = False,
) -> None:
    """Freeze one model for this machine, without Ray."""
    if out is None and not debug:
        raise UsageError("--out is missing: name the folder to write, or --debug to write nothing")
    if debug and (out is not None or device is not None):
        raise UsageError(
            "--debug runs the eager model on the CPU and writes nothing; omit --out and --device"
        )
    if out is not None:
        check_folder(out, "--out")
    samples = Path(inputs) if inputs and inputs.endswith((".safetensors", ".npz")) else None
    spec = (
        declared_spec(_parsed(inputs, "inputs"), _parsed(dims, "dims"))
        if inputs and not samples
        else None
    )
    source_args, points, limits = (
        _parsed(args, "args"),
        [_point(text) for text in point or ()],
        _limits(limit or ()),
    )
    if device_class_ != "auto":
        os.environ.update(
            device_class(device_class_).limits
        )  # must be set before torch is imported below
    if debug and not source.startswith("torchscript:"):  # needs the JIT to load
        os.environ["PYTORCH_JIT"] = "0"
    from freezer.freezing.freeze import FreezeOptions, freeze_source, load_subject
    from freezer.freezing.packaging import evidence_of
    from freezer.freezing.sources import fetched, parse_source
    from freezer.runtime.devices import CPU

    here = Path.cwd()
    parsed = parse_source(
        source,
        folder=here,
        search_path=(str(here),),
        args=source_args,
        weights=weights,
        seed=seed,
        method=method,
        sha256=sha256,
        trust=trust,
    )
    options = FreezeOptions(
        name=name,
        recipes=recipe or ("auto",),
        device_class=device_class_,
        num_threads=threads or None,
        points=points,
        preserve=preserve or (),
        objective=objective,
        limits=limits,
        reset=reset,
        device=device,
        policy=SamplingPolicy(accept_noise=accept_noise),
    )
    with tempfile.TemporaryDirectory(prefix="coldpress-") as cache:
        found = fetched(parsed, Path(cache))
        if out is None:
            _debug(load_subject(found, name, spec, samples, options.for_subject(CPU)))
            return
        try:
            result = freeze_source(found, spec=spec, samples=samples, out=out, options=options)
        except FreezeError as error:
            errors = evidence_of(out) / "errors.txt"
            errors.parent.mkdir(parents=True, exist_ok=True)
            errors.write_text("".join(traceback.format_exception(error)))
            error.add_note(f"full error: {errors}")
            raise
    _print_result(result)
    if result.artifact is None:
        sys.exit(REFUSED)


def _print_result(result: FreezeResult) -> None:
    """Print the verdict, the failures, the warnings of the capture, and what was written."""
    if result.verdict != "failed":  # whose reason has them
        for failed, why in result.failures.items():
            say(f"{failed} was not built: {why}")
    say(f"{result.verdict}: {result.reason}")
    if result.verdict == "unstable":
        say("repeat it on a quieter machine, with --threads 1, or with --accept-noise")
    if result.evidence is not None:
        say(f"evidence and full errors: {result.evidence}")
    if result.artifact is not None:
        for warning in result.artifact.manifest.freezing.warnings:
            say(f"warning: {warning}", style="yellow")
        say(f"wrote {result.artifact.folder}, made for {result.artifact.manifest.device_class}")


def _debug(subject: Subject) -> None:
    """Print the outputs of the eager model."""
    from freezer.freezing.judging import debug as debug_here

    found = debug_here(subject)
    rows = table("input set", "sizes", "output", "shape", "from", "to", "off float64 by")
    for row in found.figures:
        sizes = ", ".join(f"{name} {size}" for name, size in row.point.items())
        not_finite = f" ({row.num_not_finite} NaN or Inf)" if row.num_not_finite else ""
        bounds = ["" if value is None else f"{value:.4g}" for value in (row.low, row.high)]
        error = "" if row.relative_error is None else f"{row.relative_error:.2g}"
        rows.add_row(
            str(row.set_index),
            sizes,
            row.output,
            f"{row.dtype} {list(row.shape)}{not_finite}",
            *bounds,
            error,
        )
    console.print(rows, markup=False, highlight=False)
    for fact in found.facts:
        say(fact)
    for warning in found.warnings:
        say(f"warning: {warning}", style="yellow")
    say("debugged: the eager model ran; nothing was frozen and nothing was written")


def _point(text: str) -> dict[str, int]:
    """Parse `batch=8,length=128`."""
    pairs = [part.partition("=") for part in text.split(",")]
    found = {name.strip(): int(size) for name, _, size in pairs if size.strip().isdecimal()}
    if len(found) != len(pairs):
        raise UsageError(f"--point {text!r}: expected one size per dim: batch=8,length=128")
    return found


def _limits(given: Sequence[str]) -> Limits:
    """Parse the limits `size_mb_max=100`, and check them as those of a catalog."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--limit {text!r}: expected NAME=VALUE: size_mb_max=100")
        if problem := limit_problem(name, _number(value)):
            raise UsageError(f"--limit {text!r}: {problem}")
        if name in CAMPAIGN_LIMITS:
            raise UsageError(
                f"--limit {text!r}: only campaigns apply {name}; remove it, or write a catalog"
            )
        found[name] = float(value)
    return Limits(**found)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _parsed(text: str, option: str) -> Any:
    """Parse the JSON of an option."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--{option} {text!r} is not JSON: {error}") from None
    if not isinstance(found, dict | list if option == "inputs" else dict):
        expected = "an object or a list" if option == "inputs" else "a JSON object"
        raise UsageError(f"--{option} {text!r}: expected {expected}: '{EXAMPLES[option]}'")
    return found
