"""The commands over one artifact, `coldpress verify`, `inspect` and `run`, and over this machine,
`classes` and `doctor`.

Only commands import torch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from typer import Option

from freezer.artifact import ERROR_RATIO, folder_of
from freezer.artifact.description import describe, frozen_code
from freezer.checks import CheckRequest, Finding, run_checks
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
from freezer.cli.store_commands import named_artifact
from freezer.codec import encode
from freezer.errors import FAILED, ColdpressError, ContractError, UsageError, first_line
from freezer.files import check_file, replacing, scratch_folder
from freezer.hardware import DEVICE_CLASSES, detect, node_expressions
from freezer.spec import text_of

if TYPE_CHECKING:
    from freezer.runtime.arrays import Array
    from freezer.runtime.contract import OpenModel
    from freezer.serving.verify import Verification


NUM_VALUES = 4
"""Values of each output that `run` prints."""


def verify(
    reference: ReferenceArgument,
    store: FolderOrStoreOption = None,
    device_class_: ClassOption = "auto",
    threads: ThreadsOption = None,
    speed: Annotated[
        bool, Option("--speed", help="Also compare its speed with the portable artifact's.")
    ] = False,
    samples: Annotated[
        Path | None, Option(help="Samples of a lower precision: judge its budget again here.")
    ] = None,
    device: DeviceOption = None,
    key: KeysOption = None,
    min_version: MinVersionOption = 0,
) -> None:
    """Verify every digest, and run the golden inputs on this machine."""
    from freezer.serving.verify import verify as verify_here

    sys.path.append(str(Path.cwd()))  # of the metric of a budget
    verification = verify_here(
        reference,
        store=store,
        device_class=device_class_,
        threads=threads,
        speed=speed,
        samples=samples,
        device=device,
        trusted_keys=key or (),
        min_version=min_version,
    )
    for refusal in verification.ladder:
        say(f"skipped {refusal}")
    _print_figures(verification)
    say(
        f"{reference}: {verification.num_files} files match their digests, and"
        f" {verification.device_class} gives the golden outputs here"
    )
    if speed:
        say(f"speed: {verification.speed or 'not compared, portable itself serves here'}")


def _print_figures(verification: Verification) -> None:
    """Print the figures of the canary and of the budget."""
    rows = table("golden set", "output", "error ratio", "max abs err")
    for figure in verification.figures:
        ratio = "" if figure.error_ratio is None else f"{figure.error_ratio:.2f}"
        rows.add_row(str(figure.set_index), figure.output, ratio, f"{figure.max_abs_err:.3g}")
    console.print(rows, markup=False, highlight=False)
    say(f"error ratio: {ERROR_RATIO}", "dim")
    if verification.accuracy is not None:
        bounds = verification.accuracy.bounds.items()
        say(f"budget kept: {', '.join(text_of(name, value, bound=True) for name, value in bounds)}")


def inspect(
    reference: ReferenceArgument,
    store: StoreOption = "./store",
    device_class_: ClassOption = "auto",
    as_json: Annotated[bool, Option("--json", help="Print the manifest.")] = False,
    code: Annotated[bool, Option("--code", help="Print the code of the frozen model.")] = False,
) -> None:
    """Print an artifact's manifest and what freezing did, or the code of its model."""
    with scratch_folder() as scratch:
        paths = None if code else ()
        artifact, published = named_artifact(reference, store, device_class_, scratch, paths)
        if as_json:
            sys.stdout.write(artifact.manifest.to_bytes().decode())
        elif code:
            sys.stdout.write(frozen_code(artifact))
        else:
            rows = table()
            rows.add_column(style="bold", no_wrap=True)
            rows.add_column(overflow="fold")
            for title, value in describe(artifact.manifest, published):
                rows.add_row(title, Text(value))
            console.print(rows, highlight=False)


def run(
    reference: ReferenceArgument,
    input_: Annotated[Path, Option("--input", help="Tensors by input name: .safetensors or .npz.")],
    output: Annotated[
        Path | None, Option(help="File to write, .safetensors. Default: only print.")
    ] = None,
    store: FolderOrStoreOption = None,
    device_class_: ClassOption = "auto",
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    key: KeysOption = None,
    min_version: MinVersionOption = 0,
) -> None:
    """Run a frozen model on a file of inputs."""
    if output is not None:
        if output.suffix != ".safetensors":
            raise UsageError(f"--output {output}: expected a .safetensors file")
        check_file(output, "--output")
    from freezer.runtime.tensor_files import read_inputs
    from freezer.serving.load import load

    model = load(
        reference,
        store=store,
        device_class=device_class_,
        threads=threads,
        strict=folder_of(reference) is not None,
        device=device,
        trusted_keys=key or (),
        min_version=min_version,
        arrays="numpy",
    )
    outputs = _outputs(model, read_inputs(input_, model.inputs))
    _print_outputs(outputs)
    if output is not None:
        _write(outputs, output)


def _print_outputs(outputs: Mapping[str, Array]) -> None:
    from freezer.runtime.arrays import name_of, widened

    for name, array in outputs.items():
        values = widened(array).flatten()[:NUM_VALUES]
        say(f"{name}: {name_of(array.dtype)} {list(array.shape)}, first values {values}")


def _write(outputs: dict[str, Array], output: Path) -> None:
    from freezer.runtime.tensor_files import array_bytes

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output, None) as partial:
            partial.write_bytes(array_bytes(outputs))
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written: {error}") from error
    say(f"wrote {', '.join(outputs)} to {output}")


def _outputs(model: OpenModel, sets: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The outputs for all input sets; those of several sets are named `0/NAME`, `1/NAME`, ..."""
    outputs: dict[str, Array] = {}
    for index, arrays in enumerate(sets):
        try:
            leaves = model.leaves(**arrays)
        except ColdpressError:
            raise
        except Exception as error:  # a payload may raise anything
            raise ContractError(
                f"input set {index}: the model fails: {type(error).__name__}: {first_line(error)};"
                " compare its values with those that the source model takes"
            ) from error
        for spec, leaf in zip(model.outputs, leaves, strict=True):
            outputs[f"{index}/{spec.name}" if len(sets) > 1 else spec.name] = leaf
    return outputs


def classes(
    as_json: JsonOption = False,
    affinity: Annotated[
        str | None,
        Option(help="Print Kubernetes' nodeAffinity for the nodes of this class."),
    ] = None,
) -> None:
    """Print this machine's device classes, most specific first, with where they have run, and the
    reasons against the next better ones.
    """
    if affinity is not None:
        terms = [{"matchExpressions": node_expressions(affinity)}]
        rule = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        say_json({"nodeAffinity": rule}, indent=2)
        return
    machine = detect()
    if as_json:
        say_json(asdict(machine))
        return
    for name in machine.classes:
        say(f"{name:20}  has run {DEVICE_CLASSES[name].run_on}")
    for name, reason in machine.next_better.items():
        say(f"not {name}: {reason}", "dim")


_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


def doctor(
    store: Annotated[
        str | None, Option("--store", help="Also check this store: a path or URI.")
    ] = None,
    tracking_uri: Annotated[
        str | None, Option(help="Also check this MLflow server or database.")
    ] = None,
    address: Annotated[
        str | None, Option(help="Also check this Ray cluster. Default: RAY_ADDRESS.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, and name a remedy for each problem; exit code 1 if there are errors."""
    findings = []
    for finding in run_checks(
        CheckRequest(
            store=store,
            tracking_uri=tracking_uri,
            address=address,
        )
    ):
        findings.append(encode(finding))
        if not as_json:
            _print(finding)
    counts = Counter(finding["level"] for finding in findings)
    num_errors, num_warnings = counts["error"], counts["warning"]
    if as_json:
        say_json({"num_errors": num_errors, "num_warnings": num_warnings, "findings": findings})
    else:
        say(f"errors: {num_errors}, warnings: {num_warnings}")
    if num_errors:
        sys.exit(FAILED)


def _print(finding: Finding) -> None:
    """Print a finding, with its remedy unwrapped, so that it can be copied."""
    say(f"{finding.level:7}  {finding.check:16}  {finding.text}", _STYLES[finding.level])
    if finding.remedy:
        say(f"         remedy: {finding.remedy}")
