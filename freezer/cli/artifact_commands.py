"""The commands over one artifact: `coldpress verify`, `inspect`, `run` and `classes`.

Only commands import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text
from safetensors import SafetensorError

from freezer.artifact import Artifact, describe, folder_of, readable
from freezer.cli.arguments import (
    ClassOption,
    DeviceOption,
    FolderOrStoreOption,
    JsonOption,
    KeysOption,
    MinVersionOption,
    ReferenceArgument,
    StoreOption,
    ThreadsOption,
    console,
    say,
    say_json,
    table,
)
from freezer.cli.store_commands import pick
from freezer.errors import UsageError
from freezer.files import check_file, replacing, scratch_folder
from freezer.hardware import detect
from freezer.store import Store

if TYPE_CHECKING:
    from freezer.runtime.frozen_model import FrozenModel
    from freezer.runtime.native import NativeModel
    from freezer.serving.verify import Verification

Runtime = Literal["torch", "native"]

Tensors = Mapping[str, Any]
"""Tensors or arrays by name."""

SUFFIXES = (".safetensors", ".npz", ".npy")

INPUT_HELP = (
    "Tensors by input name: .safetensors or .npz; .npy for one input; - for any of them on stdin."
)

STARTS = {b"\x93NUMPY": ".npy", b"PK": ".npz"}
"""First bytes of files on stdin, and their suffixes."""


def verify(
    reference: ReferenceArgument,
    store: FolderOrStoreOption = None,
    device_class_: ClassOption = "auto",
    threads: ThreadsOption = None,
    speed: Annotated[
        bool, typer.Option("--speed", help="Also compare its speed with the portable artifact's.")
    ] = False,
    portable: Annotated[
        Path | None, typer.Option(help="With --speed: folder of the portable artifact.")
    ] = None,
    device: DeviceOption = None,
    key: KeysOption = None,
    min_version: MinVersionOption = 0,
) -> None:
    """Verify every digest, and run the golden inputs on this machine."""
    from freezer.serving.verify import verify as verify_here

    verification = verify_here(
        reference,
        store=store,
        device_class=device_class_,
        threads=threads,
        speed=speed,
        portable=portable,
        device=device,
        trusted_keys=key or (),
        min_version=min_version,
    )
    _print_verification(reference, verification)
    if speed and verification.speed is None:
        say("portable itself serves here, so no speed is compared")


def _print_verification(reference: str, verification: Verification) -> None:
    for refusal in verification.ladder:
        say(f"skipped {refusal}")
    rows = table("golden set", "output", "error ratio", "max abs err")
    for figure in verification.figures:
        ratio = "" if figure.error_ratio is None else f"{figure.error_ratio:.2f}"
        rows.add_row(str(figure.set_index), figure.output, ratio, f"{figure.max_abs_err:.3g}")
    console.print(rows, markup=False, highlight=False)
    say(
        f"{reference}: {verification.num_files} files match their digests, and"
        f" {verification.device_class} gives the golden outputs here"
    )
    timed = verification.speed
    if timed is not None:
        say(f"speed: {timed}; by the manifests {timed.expected:.2f} times")


def inspect(
    reference: ReferenceArgument,
    store: StoreOption = "./store",
    device_class_: ClassOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest.")] = False,
    code: Annotated[
        bool, typer.Option("--code", help="Print the code of the frozen model.")
    ] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="Print the graph of the frozen model.")
    ] = False,
    captured: Annotated[
        bool, typer.Option("--captured", help="With --code or --graph: of the captured model.")
    ] = False,
) -> None:
    """Print an artifact's manifest and what freezing did, or the code or graph of its model."""
    kinds = [name for name, wanted in (("code", code), ("graph", graph)) if wanted]
    if captured and not kinds:
        raise UsageError("--captured needs --code or --graph")
    with scratch_folder() as scratch:
        folder = folder_of(reference)
        published = tuple[str, ...]()
        if folder is not None:
            artifact = Artifact.read(folder)
        else:
            opened = Store.open(store)
            version = opened.version(reference)
            published = tuple(version.images)
            name = pick(version, device_class_)
            paths = None if kinds else ()
            artifact = opened.materialize(version, name, Path(scratch), paths=paths)
        if as_json:
            sys.stdout.write(artifact.manifest.to_bytes().decode())
        elif kinds:
            texts = [readable(artifact, kind, captured=captured) for kind in kinds]
            sys.stdout.write("\n".join(texts))
        else:
            _print_description(artifact, published)


def _print_description(artifact: Artifact, published: Sequence[str]) -> None:
    rows = table()
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, value in describe(artifact.manifest, published):
        rows.add_row(name, Text(value))
    console.print(rows, highlight=False)


def run(
    reference: ReferenceArgument,
    input_: Annotated[str, typer.Option("--input", help=INPUT_HELP)],
    output: Annotated[
        Path, typer.Option(help="File to write: .safetensors or .npz; .npy for one output.")
    ],
    store: FolderOrStoreOption = None,
    device_class_: ClassOption = "auto",
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    key: KeysOption = None,
    min_version: MinVersionOption = 0,
    runtime: Annotated[
        Runtime,
        typer.Option(help="native: without importing torch; Inductor payloads for CPUs only."),
    ] = "torch",
) -> None:
    """Run a frozen model on a file of inputs."""
    if output.suffix not in SUFFIXES:
        raise UsageError(f"--output {output}: expected a .safetensors, .npz or .npy file")
    check_file(output, "--output")
    from freezer.serving.load import load

    any_runtime: Callable[..., FrozenModel | NativeModel] = load
    model = any_runtime(
        reference,
        store=store,
        device_class=device_class_,
        threads=threads,
        strict=folder_of(reference) is not None,
        device=device,
        trusted_keys=key or (),
        min_version=min_version,
        runtime=runtime,
    )
    names = [spec.name for spec in model.inputs.tensors]
    outputs = _outputs(model, _read_sets(input_, names, arrays=runtime == "native"))
    _write(outputs, output)
    say(f"wrote {', '.join(outputs)} to {output}")


def _outputs(model: FrozenModel | NativeModel, sets: Sequence[Tensors]) -> Tensors:
    """The outputs for all input sets, as tensors on the CPU or arrays; those of several sets are
    named `0/NAME`, `1/NAME`, ...
    """
    from freezer.runtime.native import NativeModel

    outputs: dict[str, Any] = {}
    for index, tensors in enumerate(sets):
        leaves: Sequence[Any]
        if isinstance(model, NativeModel):
            leaves = model.leaves(**tensors)
        else:
            from freezer.runtime.devices import tensors_on
            from freezer.runtime.tensors import leaves_of

            answer = model(**tensors_on(tensors, model.device))
            leaves = [leaf.cpu() for leaf in leaves_of(answer)]
        for spec, leaf in zip(model.outputs, leaves, strict=True):
            outputs[f"{index}/{spec.name}" if len(sets) > 1 else spec.name] = leaf
    return outputs


def _read_sets(input_: str, names: Sequence[str], *, arrays: bool) -> Sequence[Tensors]:
    """The input sets of a file, or of stdin in any of the formats, as tensors or arrays."""
    if input_ == "-":
        data = sys.stdin.buffer.read()
        suffixes = [suffix for start, suffix in STARTS.items() if data.startswith(start)]
        with scratch_folder() as scratch:
            path = Path(scratch) / f"stdin{(*suffixes, '.safetensors')[0]}"
            path.write_bytes(data)
            return _read_sets(str(path), names, arrays=arrays)
    from freezer.runtime.tensor_files import read_array_sets, read_npy

    if input_.endswith(".npy"):
        if len(names) != 1:
            raise UsageError(
                f"--input {input_}: a .npy file has one tensor, and the model takes"
                f" {', '.join(names)}; use .npz"
            )
        array = read_npy(Path(input_))
        if arrays:
            return [{names[0]: array}]
        import torch

        return [{names[0]: torch.from_numpy(array)}]
    if arrays:
        return read_array_sets(Path(input_))
    from freezer.runtime.tensor_files import read_samples

    return read_samples(Path(input_))


def _write(outputs: Tensors, path: Path) -> None:
    """Write a whole file of outputs, or none.

    Raises:
        UsageError: the file cannot be written, or has one tensor where there are several.
    """
    if path.suffix == ".npy" and len(outputs) != 1:
        raise UsageError(
            f"--output {path}: a .npy file has one tensor, and there are {', '.join(outputs)}; use"
            " .npz"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, None) as partial:
            if path.suffix == ".safetensors":
                _save_safetensors(outputs, partial)
            else:
                _save_numpy(outputs, partial, one=path.suffix == ".npy")
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"--output {path} cannot be written: {error}; free space, or name another file"
        ) from error


def _save_safetensors(outputs: Tensors, path: Path) -> None:
    import numpy as np

    if all(isinstance(value, np.ndarray) for value in outputs.values()):
        from freezer.runtime.tensor_files import save_arrays

        save_arrays(outputs, path)
    else:
        from freezer.runtime.tensor_files import save_tensors

        save_tensors(outputs, path)


def _save_numpy(outputs: Tensors, path: Path, *, one: bool) -> None:
    """Save tensors or arrays for numpy, which lacks bfloat16: those become float32."""
    import numpy as np

    arrays: dict[str, Any] = {}
    for name, value in outputs.items():
        if isinstance(value, np.ndarray):
            arrays[name] = value
        else:
            exact = str(value.dtype) != "torch.bfloat16"
            arrays[name] = (value if exact else value.float()).numpy()
    with path.open("wb") as file:
        if one:
            np.save(file, next(iter(arrays.values())))
        else:
            np.savez(file, **arrays)


def classes(as_json: JsonOption = False) -> None:
    """Print this machine's device classes, most specific first, and the reasons against the next
    better ones.
    """
    machine = detect()
    if as_json:
        say_json(asdict(machine))
        return
    for name in machine.classes:
        say(name)
    for name, reason in machine.next_better.items():
        say(f"not {name}: {reason}", "dim")
