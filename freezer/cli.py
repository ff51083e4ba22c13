"""The command `coldpress`. Exit codes: 0; 1 refused or verification failed; 2 usage; 3 store unreachable.

`pull`, `inspect` and `classes` read JSON and copy files: they import no torch.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from freezer.artifact import MANIFEST, Artifact, folder_of
from freezer.describe import describe
from freezer.destinations import check_file, check_folder, made_parent
from freezer.device_class import detect, device_class
from freezer.errors import ColdpressError, IncompatibleError, StoreUnreachableError, UsageError
from freezer.ladder import rungs
from freezer.manifest import Manifest
from freezer.readable import readable
from freezer.sources import fetched, parse_source
from freezer.spec import declared_spec
from freezer.store import Store, Version

if TYPE_CHECKING:
    from torch import Tensor

    from freezer.subject import Subject

REFUSED, USAGE, UNREACHABLE = 1, 2, 3

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Frozen PyTorch models, made for the hardware they serve on.",
)
console = Console()

StoreOption = Annotated[str, typer.Option("--store", help="URI of the store.")]
ClassOption = Annotated[str, typer.Option("--device-class", help="A device class, or auto for what this machine runs best.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", help="Threads that calls may use. Default: torch's own, within this process's CPUs.")
]


KeysOption = Annotated[
    list[Path] | None,
    typer.Option("--key", help="A public key, PEM, that must have signed what is served. Repeatable: any."),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="Where to run: cpu, cuda or cuda:N. Default: what the artifact is made for.")
]


def main() -> None:
    """Run the command, and turn errors into a line on stderr and an exit code."""
    try:
        app()
    except StoreUnreachableError as error:
        _fail(error, UNREACHABLE)
    except UsageError as error:
        _fail(error, USAGE)
    except ColdpressError as error:
        _fail(error, REFUSED)


def _fail(error: ColdpressError, code: int) -> None:
    Console(stderr=True).print(error.coded, style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


@app.command()
def freeze(
    source: Annotated[
        str,
        typer.Argument(
            help="python:MODULE:FUNCTION, torchscript:FILE, export:FILE, pickle:FILE or transformers:NAME; FILE may be a URL."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The folder to write.")] = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            help="""JSON, as in a catalog: '{"x": {"shape": ["batch", 8]}}'; or a samples file (.safetensors, .npz). An exported """
            "program knows its own."
        ),
    ] = None,
    dims: Annotated[str, typer.Option(help="""Bounds of named dims: '{"batch": {"min": 1, "max": 16}}'.""")] = "{}",
    name: Annotated[str, typer.Option(help="Name of the model in the manifest.")] = "model",
    args: Annotated[str, typer.Option(help="""Arguments of the source: '{"hidden": 256}'.""")] = "{}",
    weights: Annotated[str | None, typer.Option(help="`random` makes a transformers model from a config class.")] = None,
    seed: Annotated[int, typer.Option(help="Of random weights.")] = 0,
    method: Annotated[str | None, typer.Option(help="Of a file with several methods. Default: forward.")] = None,
    sha256: Annotated[str | None, typer.Option(help="The digest that the file must have.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Load pickles, which run code.")] = False,
    device_class_: ClassOption = "auto",
    threads: Annotated[
        list[int] | None,
        typer.Option(
            help="A thread count to freeze for; the first decides. Repeatable. Default: torch's own, within this process's CPUs."
        ),
    ] = None,
    point: Annotated[
        list[str] | None,
        typer.Option(help="Sizes to try a payload of its own for: batch=8,length=128; the first decides. Repeatable."),
    ] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="A recipe, or all. Repeatable. Default: those worth a try on any model.")
    ] = None,
    preserve: Annotated[
        list[str] | None,
        typer.Option(help="An attribute or method that the frozen model still has: version, sub.version. Repeatable."),
    ] = None,
    reset: Annotated[str | None, typer.Option(help="The method that clears the model's state.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="The GPU to freeze on: cuda, cuda:1; with --device-class auto, for its class. Default: the CPU."),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Run the eager model over the same inputs with the same checks, and write nothing.")
    ] = False,
) -> None:
    """Freeze one model for this machine, without Ray."""
    if out is None and not debug:
        raise UsageError("--out is missing: name the folder to write, or --debug to write nothing")
    if out is not None and not debug:
        check_folder(out, "--out")
    if device_class_ != "auto":
        os.environ.update(device_class(device_class_).limits)  # counts only before torch is imported, which is below
    if debug and not source.startswith("torchscript:"):  # which could not even be loaded
        os.environ["PYTORCH_JIT"] = "0"  # likewise
    from freezer.freeze import freeze_source, load_subject

    here = Path.cwd()
    samples = Path(inputs) if inputs and inputs.endswith((".safetensors", ".npz")) else None
    if weights not in (None, "random"):
        raise UsageError(f"--weights {weights}: expected `random`, or nothing")
    settings = {"args": _parsed(args, "args"), "weights": weights, "seed": seed, "method": method, "sha256": sha256, "trust": trust}
    spec = declared_spec(_parsed(inputs, "inputs"), _parsed(dims, "dims")) if inputs and not samples else None
    named: dict[str, Any] = {"spec": spec, "samples": samples, "name": name, "preserve": tuple(preserve or ()), "reset": reset}
    named["points"] = [_point(text) for text in point or ()]
    with tempfile.TemporaryDirectory(prefix="coldpress-") as cache:
        found = fetched(parse_source(source, folder=here, search_path=(str(here),), **settings), Path(cache))
        if out is None or debug:
            _debug(load_subject(found, **named))
            return
        result = freeze_source(
            found,
            out=out,
            device_class=device_class_,
            num_threads=threads or None,
            recipes=tuple(recipe or ("auto",)),
            device=device,
            **named,
        )
    for failed, why in result.failures.items():
        console.print(f"{failed} was not built: {why}", markup=False, soft_wrap=True)
    console.print(f"{result.verdict}: {result.reason}", markup=False, soft_wrap=True)
    if result.tracebacks:
        errors = made_parent(out.with_name(f"{out.name}.errors.txt"))
        errors.write_text("\n".join(f"{failed}\n{text}" for failed, text in result.tracebacks.items()))
        console.print(f"the errors in full are in {errors}", markup=False, highlight=False, soft_wrap=True)
    if result.artifact is None:
        sys.exit(REFUSED)
    console.print(f"wrote {result.artifact.folder}, made for {result.artifact.manifest.device_class}", markup=False, soft_wrap=True)


def _debug(subject: Subject) -> None:
    """Print what the eager model does."""
    from freezer.debug import debug as debug_here

    found = debug_here(subject)
    table = Table("input set", "sizes", "output", "shape", "from", "to", "off float64 by", box=None, pad_edge=False)
    for row in found.figures:
        sizes = ", ".join(f"{name} {size}" for name, size in row.point.items())
        not_finite = f" ({row.num_not_finite} NaN or Inf)" if row.num_not_finite else ""
        bounds = ["" if value is None else f"{value:.4g}" for value in (row.low, row.high)]
        error = "" if row.relative_error is None else f"{row.relative_error:.2g}"
        table.add_row(str(row.set_index), sizes, row.output, f"{row.dtype} {list(row.shape)}{not_finite}", *bounds, error)
    console.print(table, markup=False, highlight=False)
    for fact in found.facts:
        console.print(fact, markup=False, highlight=False, soft_wrap=True)
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print("debugged: the eager model ran; nothing was frozen and nothing was written", highlight=False, soft_wrap=True)


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="MODEL or MODEL:VERSION.")],
    dest: Annotated[Path, typer.Option(help="The folder to write; new, or empty.")],
    store: StoreOption = "./store",
    device_class_: ClassOption = "auto",
) -> None:
    """Copy the artifact for this machine into a folder; every digest is verified."""
    if not (dest / MANIFEST).is_file():  # one that holds this very artifact is kept
        check_folder(dest, "--dest")
    opened = Store.open(store)
    version = opened.version(model)
    name = _pick(version, device_class_)
    artifact = opened.pull(version, name, dest)
    size_mb = sum(item.size_bytes for item in artifact.manifest.contents) / 1e6
    console.print(f"{version.model}:{version.number} for {name} is in {dest} ({size_mb:.1f} MB)", highlight=False, soft_wrap=True)


@app.command()
def sign(
    model: Annotated[str, typer.Argument(help="MODEL or MODEL:VERSION.")],
    key: Annotated[Path, typer.Option(help="A private EC key on P-256, PEM without a password.")],
    store: StoreOption = "./store",
    device_class_: Annotated[
        str, typer.Option("--device-class", help="Sign the artifact of this class alone. Default: those of all.")
    ] = "all",
) -> None:
    """Sign what a store has published, after its digests were compared; pulled folders hold the signatures too."""
    opened = Store.open(store)
    version = opened.version(model)
    for name in sorted(version.images) if device_class_ == "all" else [device_class_]:
        done = "signed" if opened.sign(version, name, key) else "signed by this key before"
        console.print(f"{version.model}:{version.number} for {name}: {done}", highlight=False, soft_wrap=True)


@app.command()
def verify(
    reference: Annotated[str, typer.Argument(help="An artifact folder, or MODEL[:VERSION].")],
    store: Annotated[str | None, typer.Option("--store", help="URI of the store. Default: ./store.")] = None,
    device_class_: ClassOption = "auto",
    threads: ThreadsOption = None,
    speed: Annotated[
        bool, typer.Option("--speed", help="Time it against the portable artifact too, and hold it to what its manifest promises.")
    ] = False,
    portable: Annotated[
        Path | None, typer.Option(help="With --speed: folder of the portable artifact. Default: the store's.")
    ] = None,
    device: DeviceOption = None,
    key: KeysOption = None,
) -> None:
    """Compare every digest, and run the golden inputs on this machine."""
    from freezer.verify import verify as verify_here

    asked: dict[str, Any] = {"device_class": device_class_, "threads": threads, "device": device, "trusted_keys": key or ()}
    found = verify_here(_folder_or_name(reference), store=store, speed=speed, portable=portable, **asked)
    for refusal in found.ladder:
        console.print(f"passed over {refusal}", markup=False, highlight=False, soft_wrap=True)
    table = Table("golden set", "output", "error ratio", "max abs err", box=None, pad_edge=False)
    for figure in found.figures:
        ratio = "" if figure.error_ratio is None else f"{figure.error_ratio:.2f}"
        table.add_row(str(figure.set_index), figure.output, ratio, f"{figure.max_abs_err:.3g}")
    console.print(table)
    console.print(
        f"{reference}: {found.num_files} files are what was published, and {found.device_class} answers right here", soft_wrap=True
    )
    if speed and found.speed is None:
        console.print("portable itself serves here, which is what others are timed against: nothing was timed", soft_wrap=True)
    elif found.speed is not None:
        console.print(f"speed: {found.speed}; by the manifests {found.speed.expected:.2f} times", highlight=False, soft_wrap=True)


@app.command()
def diff(
    model: Annotated[str, typer.Argument(help="MODEL or MODEL:VERSION.")],
    store: StoreOption = "./store",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Compare what the device classes of a version answer to the golden inputs; exit code 1 if two are too far apart."""
    if isinstance(_folder_or_name(model), Path):
        raise UsageError(f"{model} is a folder, which holds one class; name a model of a store: MODEL or MODEL:VERSION")
    from freezer.diff import diff as diff_here
    from freezer.difference_text import matrix, problem, sentences

    found = diff_here(model, store=store)
    if as_json:
        sys.stdout.write(json.dumps(found.to_json(), allow_nan=False) + "\n")
    else:
        count = f"{len(found.sets)} golden set{'' if len(found.sets) == 1 else 's'}"
        console.print(f"{found.model}:{found.version}, {count}", highlight=False, soft_wrap=True)
        if found.classes:
            console.print(matrix(found), markup=False, highlight=False)
        for line in sentences(found):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if found.apart:
        raise ColdpressError(problem(found), code="CP-APART")


@app.command()
def inspect(
    reference: Annotated[str, typer.Argument(help="An artifact folder, or MODEL[:VERSION].")],
    store: StoreOption = "./store",
    device_class_: ClassOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest itself.")] = False,
    code: Annotated[bool, typer.Option("--code", help="Print the code of the frozen model.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Print the graph of the frozen model.")] = False,
    captured: Annotated[bool, typer.Option("--captured", help="With --code or --graph: of the model as it was captured.")] = False,
) -> None:
    """Print an artifact's manifest and what freezing did, or the code or graph of its model."""
    kinds = [name for name, wanted in (("code", code), ("graph", graph)) if wanted]
    if captured and not kinds:
        raise UsageError("--captured goes with --code or --graph")
    folder = _folder_or_name(reference)
    if isinstance(folder, Path):
        artifact = Artifact.read(folder)
        _inspect(artifact.manifest, {}, as_json=as_json, text=_readable(artifact, kinds, captured))
        return
    opened = Store.open(store)
    version = opened.version(folder)
    name = _pick(version, device_class_)
    text = ""
    if kinds:
        with tempfile.TemporaryDirectory(prefix="coldpress-") as scratch:
            text = _readable(opened.materialize(version, name, Path(scratch)), kinds, captured)
    _inspect(opened.manifest(version, name), version.images, as_json=as_json, text=text)


@app.command()
def run(
    folder: Annotated[Path, typer.Argument(help="An artifact folder.")],
    input_: Annotated[Path, typer.Option("--input", help="Tensors by input name: .safetensors or .npz.")],
    output: Annotated[Path, typer.Option(help="File to write: .safetensors or .npz.")],
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    key: KeysOption = None,
) -> None:
    """Run a frozen model on a file of inputs."""
    if output.suffix not in (".safetensors", ".npz"):
        raise UsageError(f"--output {output}: expected a name that ends in .safetensors or .npz")
    check_file(output, "--output")
    from freezer.load import load
    from freezer.moving import tensors_on
    from freezer.outputs import leaves_of
    from freezer.samples import read_samples

    model = load(folder, threads=threads, strict=True, device=device, trusted_keys=key or ())
    sets = read_samples(input_)
    tensors: dict[str, Tensor] = {}
    for index, given in enumerate(sets):
        prefix = f"{index}/" if len(sets) > 1 else ""
        leaves = [leaf.cpu() for leaf in leaves_of(model(**tensors_on(given, model.device)))]
        tensors |= {f"{prefix}{spec.name}": leaf for spec, leaf in zip(model.outputs, leaves, strict=True)}
    _write_tensors(tensors, output)
    console.print(f"wrote {', '.join(tensors)} to {output}", highlight=False, soft_wrap=True)


@app.command()
def classes(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Print this machine's device classes, most specific first, and why not the next better ones."""
    machine = detect()
    if as_json:
        sys.stdout.write(json.dumps(asdict(machine)) + "\n")
        return
    for name in machine.classes:
        console.print(name, highlight=False)
    for name, reason in machine.next_better.items():
        console.print(f"not {name}: {reason}", style="dim", markup=False, highlight=False, soft_wrap=True)


def _point(text: str) -> dict[str, int]:
    """The sizes of `batch=8,length=128`."""
    pairs = [part.partition("=") for part in text.split(",")]
    found = {name.strip(): int(size) for name, _, size in pairs if size.strip().isdecimal()}
    if len(found) != len(pairs):
        raise UsageError(f"--point {text!r}: expected sizes of dims, each once: batch=8,length=128")
    return found


def _parsed(text: str, option: str) -> Any:
    """The JSON of an option."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--{option} {text!r} is not JSON: {error}") from None
    if not isinstance(found, dict) and not (option == "inputs" and isinstance(found, list)):
        raise UsageError(f"--{option} {text!r}: expected an object")
    return found


def _pick(version: Version, wanted: str) -> str:
    """The device class to take of a version: the one asked for, or the most specific that this machine runs."""
    if wanted != "auto":
        device_class(wanted)
        return wanted
    found = rungs(version.images, detect())
    if not found:
        published = ", ".join(sorted(version.images))
        raise IncompatibleError(
            f"{version.model}:{version.number} is published for {published}; this machine runs {', '.join(detect().classes)}"
        )
    return found[0]


def _folder_or_name(reference: str) -> Path | str:
    """A path where there is an artifact folder or the text can only be a path; else the name of a model."""
    return folder_of(reference) or reference


def _readable(artifact: Artifact, kinds: Sequence[str], captured: bool) -> str:
    return "\n".join(readable(artifact, kind, captured=captured) for kind in kinds)


def _inspect(manifest: Manifest, classes: Mapping[str, Any], *, as_json: bool, text: str) -> None:
    """Print the manifest as it is, the text where one was asked for, or else the manifest in words."""
    if as_json:
        sys.stdout.write(manifest.to_bytes().decode())
    elif text:
        sys.stdout.write(text)
    else:
        _print_manifest(manifest, classes)


def _print_manifest(manifest: Manifest, classes: Mapping[str, Any]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in describe(manifest, list(classes)):
        table.add_row(name, Text(value))
    console.print(table, highlight=False)


def _write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    partial = made_parent(path).with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    if path.suffix == ".safetensors":
        from freezer.tensor_files import save_tensors

        save_tensors(tensors, partial)
    else:
        import numpy as np
        import torch

        for name, tensor in tensors.items():
            if tensor.dtype == torch.bfloat16:
                raise UsageError(f"output {name!r} is bfloat16, which numpy lacks; write .safetensors")
        np.savez(partial, **{name: tensor.numpy() for name, tensor in tensors.items()})  # type: ignore[arg-type]
    os.replace(partial, path)


if __name__ == "__main__":
    main()
