"""The commands `coldpress pull`, `sign`, `verify`, `diff`, `inspect`, `run` and `classes`.

Only commands import torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text
from safetensors import SafetensorError

from freezer.artifact import (
    ENGINES,
    MANIFEST,
    Artifact,
    describe,
    folder_of,
    readable,
)
from freezer.cli.arguments import (
    ClassOption,
    DeviceOption,
    KeysOption,
    MinVersionOption,
    ModelArgument,
    ReferenceArgument,
    StoreOption,
    ThreadsOption,
    console,
    say,
    table,
)
from freezer.codec import encode
from freezer.errors import ColdpressError, IncompatibleError, UsageError
from freezer.files import check_file, check_folder, replacing, scratch_folder
from freezer.hardware import detect, device_class
from freezer.serving.compatibility import rungs
from freezer.store import Descriptor, Store, Version

if TYPE_CHECKING:
    from freezer.runtime.frozen_model import FrozenModel
    from freezer.runtime.native import NativeModel

Runtime = Literal["torch", "native"]

INPUT_HELP = (
    "Tensors by input name: .safetensors or .npz; .npy for one input; - for any of them on stdin."
)

STARTS = {b"\x93NUMPY": ".npy", b"PK": ".npz"}
"""First bytes of files on stdin, and their suffixes."""


def pull(
    model: ModelArgument,
    dest: Annotated[Path, typer.Option(help="New or empty folder to write.")],
    store: StoreOption = "./store",
    device_class_: ClassOption = "auto",
    min_version: MinVersionOption = 0,
) -> None:
    """Copy the artifact for this machine into a folder, and verify every digest."""
    if not (dest / MANIFEST).is_file():  # a folder with this artifact is kept
        check_folder(dest, "--dest")
    opened = Store.open(store)
    version = opened.version(model)
    if version.number < min_version:
        raise IncompatibleError(
            f"{model}: rolled_back: got version {version.number}, expected version {min_version} or"
            " later"
        )
    name = _pick(version, device_class_)
    artifact = opened.pull(version, name, dest, rank=_servable(version.images_of(name)))
    size_mb = sum(item.size_bytes for item in artifact.manifest.contents) / 1e6
    say(f"{version.model}:{version.number} for {name} is in {dest} ({size_mb:.1f} MB)")


def sign(
    model: ModelArgument,
    key: Annotated[Path, typer.Option(help="Private EC key on P-256 (PEM, without a password).")],
    store: StoreOption = "./store",
    device_class_: Annotated[
        str, typer.Option("--device-class", help="Sign only this class. Default: all.")
    ] = "all",
) -> None:
    """Verify and sign published artifacts; pulled folders contain the signatures too."""
    opened = Store.open(store)
    version = opened.version(model)
    for name in sorted(version.images) if device_class_ == "all" else [device_class_]:
        done = "signed" if opened.sign(version, name, key) else "signed by this key before"
        say(f"{version.model}:{version.number} for {name}: {done}")


def verify(
    reference: ReferenceArgument,
    store: Annotated[
        str | None, typer.Option("--store", help="URI of the store. Default: ./store.")
    ] = None,
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

    found = verify_here(
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
    for refusal in found.ladder:
        say(f"skipped {refusal}")
    rows = table("golden set", "output", "error ratio", "max abs err")
    for figure in found.figures:
        ratio = "" if figure.error_ratio is None else f"{figure.error_ratio:.2f}"
        rows.add_row(str(figure.set_index), figure.output, ratio, f"{figure.max_abs_err:.3g}")
    console.print(rows, markup=False, highlight=False)
    say(
        f"{reference}: {found.num_files} files match their digests, and {found.device_class} gives"
        " the golden outputs here"
    )
    if found.speed is not None:
        say(f"speed: {found.speed}; by the manifests {found.speed.expected:.2f} times")
    elif speed:
        say("portable itself serves here, so there is no speed to compare")


def diff(
    model: ModelArgument,
    store: StoreOption = "./store",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the golden outputs of the device classes of a version; exit code 1 if two differ too
    much.
    """
    if folder_of(model) is not None:
        raise UsageError(
            f"{model} is a folder with one class; name a model of a store: MODEL or MODEL:VERSION"
        )
    from freezer.serving.diff import diff as diff_here
    from freezer.serving.diff_text import matrix, problem, sentences

    found = diff_here(model, store=store)
    if as_json:
        sys.stdout.write(json.dumps(encode(found), allow_nan=False) + "\n")
    else:
        say(
            f"{found.model}:{found.version}, {len(found.sets)} golden"
            f" set{'' if len(found.sets) == 1 else 's'}"
        )
        if found.classes:
            console.print(matrix(found), markup=False, highlight=False)
        for line in sentences(found):
            say(line)
    if found.apart:
        raise ColdpressError(problem(found), code="CP-APART")


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
        folder, published = folder_of(reference), tuple[str, ...]()
        if folder is not None:
            artifact = Artifact.read(folder)
        else:
            opened = Store.open(store)
            version = opened.version(reference)
            published = tuple(version.images)
            paths = None if kinds else ()
            artifact = opened.materialize(
                version, _pick(version, device_class_), Path(scratch), paths=paths
            )
        if as_json:
            sys.stdout.write(artifact.manifest.to_bytes().decode())
        elif kinds:
            sys.stdout.write(
                "\n".join(readable(artifact, kind, captured=captured) for kind in kinds)
            )
        else:
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
    store: Annotated[
        str | None, typer.Option("--store", help="URI of the store. Default: ./store.")
    ] = None,
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
    if output.suffix not in (".safetensors", ".npz", ".npy"):
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
    arrays = runtime == "native"
    sets = _inputs(input_, [spec.name for spec in model.inputs.tensors], arrays=arrays)
    found: dict[str, Any] = {}
    for index, given in enumerate(sets):
        prefix = f"{index}/" if len(sets) > 1 else ""
        found |= {
            f"{prefix}{spec.name}": leaf
            for spec, leaf in zip(model.outputs, _leaves(model, given), strict=True)
        }
    if output.suffix == ".npy" and len(found) != 1:
        raise UsageError(
            f"--output {output}: a .npy file has one tensor, and there are {', '.join(found)}; use"
            " .npz"
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output, None) as partial:
            if output.suffix == ".safetensors":
                _save(found, partial, arrays=arrays)
            else:
                _save_numpy(found, partial, one=output.suffix == ".npy")
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"--output {output} cannot be written: {error}; free space, or name another file"
        ) from error
    say(f"wrote {', '.join(found)} to {output}")


def _leaves(model: FrozenModel | NativeModel, given: Mapping[str, Any]) -> Sequence[Any]:
    """The outputs of a model, as tensors on the CPU or arrays."""
    from freezer.runtime.native import NativeModel

    if isinstance(model, NativeModel):
        return model.leaves(**given)
    from freezer.runtime.devices import tensors_on
    from freezer.runtime.tensors import leaves_of

    return [leaf.cpu() for leaf in leaves_of(model(**tensors_on(given, model.device)))]


def _inputs(given: str, names: Sequence[str], *, arrays: bool) -> Sequence[Mapping[str, Any]]:
    """The input sets of --input, as tensors or arrays: of a file, or of stdin in any of the
    formats.
    """
    if given == "-":
        data = sys.stdin.buffer.read()
        suffix = next(
            (suffix for start, suffix in STARTS.items() if data.startswith(start)), ".safetensors"
        )
        with scratch_folder() as scratch:
            path = Path(scratch) / f"stdin{suffix}"
            path.write_bytes(data)
            return _inputs(str(path), names, arrays=arrays)
    if given.endswith(".npy"):
        if len(names) != 1:
            raise UsageError(
                f"--input {given}: a .npy file has one tensor, and the model takes"
                f" {', '.join(names)}; use .npz"
            )
        return [{names[0]: _read_one(Path(given), arrays=arrays)}]
    if arrays:
        from freezer.runtime.tensor_files import read_array_sets

        return read_array_sets(Path(given))
    from freezer.runtime.tensor_files import read_samples

    return read_samples(Path(given))


def _read_one(path: Path, *, arrays: bool) -> Any:
    from freezer.runtime.tensor_files import read_npy

    array = read_npy(path)
    if arrays:
        return array
    import torch

    return torch.from_numpy(array)


def _save(found: Mapping[str, Any], path: Path, *, arrays: bool) -> None:
    """Save tensors or arrays as .safetensors."""
    if arrays:
        from freezer.runtime.tensor_files import save_arrays

        save_arrays(found, path)
        return
    from freezer.runtime.tensor_files import save_tensors

    save_tensors(found, path)


def _save_numpy(found: Mapping[str, Any], path: Path, *, one: bool) -> None:
    """Save tensors or arrays for numpy, which lacks bfloat16: those become float32."""
    import numpy as np

    arrays = {name: _as_numpy(value) for name, value in found.items()}
    with path.open("wb") as file:
        if one:
            np.save(file, next(iter(arrays.values())))
        else:
            np.savez(file, **arrays)


def _as_numpy(value: Any) -> Any:
    if not hasattr(value, "numpy"):
        return value
    return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()


def classes(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print this machine's device classes, most specific first, and the reasons against the next
    better ones.
    """
    machine = detect()
    if as_json:
        sys.stdout.write(json.dumps(asdict(machine)) + "\n")
        return
    for name in machine.classes:
        say(name)
    for name, reason in machine.next_better.items():
        say(f"not {name}: {reason}", style="dim")


def _servable(images: Sequence[Descriptor]) -> int:
    """Position of the first image whose engines are installed here, or else of the best."""
    installed = {name for name in ENGINES.values() if find_spec(name) is not None}
    for rank, image in enumerate(images):
        if installed.issuperset(image.engines):
            return rank
    return 0


def _pick(version: Version, wanted: str) -> str:
    """The requested device class, or the most specific one that this machine runs."""
    if wanted != "auto":
        return device_class(wanted).name
    found = rungs(version.images, detect())
    if not found:
        published = ", ".join(sorted(version.images))
        raise IncompatibleError(
            f"{version.model}:{version.number} is published for {published}; this machine runs"
            f" {', '.join(detect().classes)}"
        )
    return found[0]
