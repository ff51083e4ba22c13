"""Load and freeze the model that a source names."""

from __future__ import annotations

from pathlib import Path

from freezer.errors import SpecError
from freezer.files import check_folder
from freezer.freezing.freeze import freeze_subject, freeze_target
from freezer.freezing.freeze_options import DEFAULTS, FreezeOptions, FreezeResult
from freezer.freezing.models import (
    Subject,
    SubjectOptions,
    example_spec,
    load_source,
    own_spec,
    prepare,
)
from freezer.freezing.sources import Source
from freezer.freezing.target import resolve_device
from freezer.runtime.tensor_files import read_samples
from freezer.spec import InputSpec


def freeze_source(
    source: Source,
    *,
    spec: InputSpec | None,
    samples: Path | None,
    out: Path,
    options: FreezeOptions = DEFAULTS,
) -> FreezeResult:
    """Freeze the model that a source names, for the command `coldpress freeze`.

    Args:
        source: see `sources.parse_source`.
        spec: the input spec; None to use the source's own, or the shapes of the samples.
        samples: a file of real input sets.
        out: the folder to write; new or empty.
        options: see `FreezeOptions`. A source is loaded onto the CPU, so `device_class="auto"` is
            this machine's CPU class unless `device` names a GPU.

    Raises:
        SourceError: the model cannot be loaded.
        UsageError, SpecError, JudgeError: see `freeze`.
    """
    check_folder(out, "out")
    device_class, device = resolve_device(None, options.device_class, options.device)
    subject = load_subject(source, options.name, spec, samples, options.for_subject(device))
    target = freeze_target(subject, device_class, device, options)
    return freeze_subject(subject, target, out=out, source=str(source), options=options)


def load_subject(
    source: Source,
    name: str,
    spec: InputSpec | None,
    samples: Path | None,
    options: SubjectOptions,
) -> Subject:
    """Load the model that a source names, with its input spec and input sets.

    Args:
        source: see `sources.parse_source`.
        name: model name.
        spec: the input spec; None to use the source's own, or the shapes of the samples.
        samples: a file of real input sets.
        options: how to prepare it.

    Raises:
        SourceError, SpecError, JudgeError: the model, its samples or its inputs are invalid.
    """
    model = load_source(source)
    sets = read_samples(samples) if samples else []
    spec = spec or own_spec(model) or (example_spec(sets[0], {})[0] if sets else None)
    if spec is None:
        raise SpecError(
            f"source {source} does not declare its inputs; declare them (`inputs:` in a catalog,"
            " `--inputs` for `coldpress freeze`), or give samples"
        )
    return prepare(
        name,
        model,
        spec,
        sets,
        options,
    )
