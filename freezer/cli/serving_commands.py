"""The commands `coldpress verify`, `diff` and `run`, which check and call artifacts on this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from freezer.cli.arguments import ClassOption, DeviceOption, KeysOption, StoreOption, ThreadsOption, console, folder_or_name, say
from freezer.codec import encode
from freezer.errors import ColdpressError, UsageError
from freezer.files.paths import check_file

if TYPE_CHECKING:
    from torch import Tensor


def verify(
    reference: Annotated[str, typer.Argument(help="An artifact folder, or MODEL[:VERSION].")],
    store: Annotated[str | None, typer.Option("--store", help="URI of the store. Default: ./store.")] = None,
    device_class_: ClassOption = "auto",
    threads: ThreadsOption = None,
    speed: Annotated[
        bool, typer.Option("--speed", help="Also time it against the portable artifact, and check the speedup of its manifest.")
    ] = False,
    portable: Annotated[
        Path | None, typer.Option(help="With --speed: folder of the portable artifact. Default: from the store.")
    ] = None,
    device: DeviceOption = None,
    key: KeysOption = None,
) -> None:
    """Verify every digest, and run the golden inputs on this machine."""
    from freezer.serving.verify import verify as verify_here

    found = verify_here(
        folder_or_name(reference),
        store=store,
        device_class=device_class_,
        threads=threads,
        speed=speed,
        portable=portable,
        device=device,
        trusted_keys=key or (),
    )
    for refusal in found.ladder:
        say(f"skipped {refusal}")
    table = Table("golden set", "output", "error ratio", "max abs err", box=None, pad_edge=False)
    for figure in found.figures:
        ratio = "" if figure.error_ratio is None else f"{figure.error_ratio:.2f}"
        table.add_row(str(figure.set_index), figure.output, ratio, f"{figure.max_abs_err:.3g}")
    console.print(table)
    say(f"{reference}: {found.num_files} files match their digests, and {found.device_class} gives the golden outputs here")
    if speed and found.speed is None:
        say("portable itself serves here, so there is no speed to compare")
    elif found.speed is not None:
        say(f"speed: {found.speed}; by the manifests {found.speed.expected:.2f} times")


def diff(
    model: Annotated[str, typer.Argument(help="MODEL or MODEL:VERSION.")],
    store: StoreOption = "./store",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the golden outputs of the device classes of a version; exit code 1 if two differ too much."""
    if isinstance(folder_or_name(model), Path):
        raise UsageError(f"{model} is a folder with one class; name a model of a store: MODEL or MODEL:VERSION")
    from freezer.serving.diff import diff as diff_here
    from freezer.serving.diff import matrix, problem, sentences

    found = diff_here(model, store=store)
    if as_json:
        sys.stdout.write(json.dumps(encode(found), allow_nan=False) + "\n")
    else:
        count = f"{len(found.sets)} golden set{'' if len(found.sets) == 1 else 's'}"
        say(f"{found.model}:{found.version}, {count}")
        if found.classes:
            console.print(matrix(found), markup=False, highlight=False)
        for line in sentences(found):
            say(line)
    if found.apart:
        raise ColdpressError(problem(found), code="CP-APART")


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
        raise UsageError(f"--output {output}: expected a .safetensors or .npz file")
    check_file(output, "--output")
    from freezer.runtime.devices import tensors_on
    from freezer.runtime.pytree import leaves_of
    from freezer.runtime.tensors import read_samples
    from freezer.serving.load import load

    model = load(folder, threads=threads, strict=True, device=device, trusted_keys=key or ())
    sets = read_samples(input_)
    tensors: dict[str, Tensor] = {}
    for index, given in enumerate(sets):
        prefix = f"{index}/" if len(sets) > 1 else ""
        leaves = [leaf.cpu() for leaf in leaves_of(model(**tensors_on(given, model.device)))]
        tensors |= {f"{prefix}{spec.name}": leaf for spec, leaf in zip(model.outputs, leaves, strict=True)}
    _write_tensors(tensors, output)
    say(f"wrote {', '.join(tensors)} to {output}")


def _write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    if path.suffix == ".safetensors":
        from freezer.runtime.tensors import save_tensors

        save_tensors(tensors, partial)
    else:
        import numpy as np
        import torch

        for name, tensor in tensors.items():
            if tensor.dtype == torch.bfloat16:
                raise UsageError(f"output {name!r} is bfloat16, which numpy lacks; write .safetensors")
        np.savez(partial, **{name: tensor.numpy() for name, tensor in tensors.items()})  # type: ignore[arg-type]
    os.replace(partial, path)
