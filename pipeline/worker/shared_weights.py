"""One set of weights for all classes of a model.

A source that runs code may give other weights on another platform: torch's random numbers, and
functions such as log, have other bits there. Who loads it first keeps the tensors and then records
the load:

    STORE/.coldpress/weights/<source_key>-<digest>/tensors.pt
    STORE/.coldpress/weights/<source_key>/first.json

These are all tensors if loading drew random numbers, else only the buffers, which are small: then
the parameters come from files. Other platforms whose weights differ load the tensors. On the same
platform, other weights mean that the source is not reproducible.
"""

from __future__ import annotations

import json
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.codec import encode, frozen, read_record
from freezer.errors import JudgeError
from freezer.files import write_whole
from freezer.freezing.sources import CODE_KINDS
from pipeline.worker.requests import Request
from pipeline.worker.task_child import load_subject
from pipeline.workspace import Workplace, workplace

if TYPE_CHECKING:
    from torch import Tensor

    from freezer.freezing.models import Subject
    from freezer.freezing.target import Target

RECORD = "first.json"
TENSORS = "tensors.pt"


@frozen
class Load:
    """A load of a source.

    Attributes:
        weights: digest of the model's weights.
        device_class: class that it was loaded for.
        platform: what random numbers and rounding depend on.
    """

    weights: str
    device_class: str
    platform: str


def load_shared(request: Request, target: Target, staging: Path) -> tuple[Subject, str]:
    """Load the subject of a request with the weights that all classes share.

    Returns:
        The subject, and a note for the reason of the verdict if this platform's weights differ.

    Raises:
        JudgeError: the first load's weights cannot be loaded here; code CP-WEIGHTS-DIFFER.
    """
    import torch

    from freezer.freezing.models import positions, tensors_of

    entry, key = request.entry, request.source
    if not key or entry.source.kind not in CODE_KINDS:
        return load_subject(entry, target), ""
    torch.manual_seed(entry.source.seed)
    before = positions()
    subject = load_subject(entry, target)
    tensors = tensors_of(subject.model)
    kept = dict(subject.model.named_buffers()) if positions() == before else tensors
    place = workplace(request.store)
    here = Load(weights=subject.weights, device_class=request.device_class, platform=_platform())
    first = _first(place, key) or _record(place, key, here, kept, staging)
    if first.weights == here.weights:
        return subject, ""
    if first.platform != here.platform:
        _copy_to(tensors, place, _name(key, first))
        subject = replace(subject)  # with another digest
    if subject.weights != first.weights:
        raise JudgeError(
            f"{entry.name}: the source gave the weights {first.weights} for {first.device_class}"
            f" ({first.platform}), and {here.weights} for {here.device_class} ({here.platform});"
            " seed torch's default generator, name the files that it reads (`files`), or load the"
            " weights from a file",
            code="CP-WEIGHTS-DIFFER",
        )
    return subject, f"; the weights are those of {first.device_class}: the source gives others here"


def _copy_to(tensors: dict[str, Tensor], place: Workplace, name: str) -> None:
    """Copy kept tensors to a model's, unless they are lost or do not fit."""
    import torch

    folder = place.folder("weights", name)
    with suppress(KeyError, RuntimeError, OSError), torch.no_grad():
        place.bring("weights", name, folder)
        for path, tensor in torch.load(folder / TENSORS).items():
            tensors[path].copy_(tensor)


def _platform() -> str:
    import torch

    from freezer.runtime.devices import host_fingerprint

    return (
        f"{host_fingerprint()['cpu']}, {torch.backends.cpu.get_cpu_capability()},"
        f" {torch.get_num_threads()} threads, torch {torch.__version__}"
    )


def _first(place: Workplace, key: str) -> Load | None:
    content = place.read("weights", key, RECORD)
    return None if content is None else read_record(Load, content, origin=RECORD)


def _record(
    place: Workplace,
    key: str,
    here: Load,
    tensors: dict[str, Tensor],
    staging: Path,
) -> Load:
    """Record a load, and return the first one: of two at once, one wins."""
    import torch

    kept, claim = staging / "weights", staging / "first"
    kept.mkdir()
    claim.mkdir()
    torch.save(tensors, kept / TENSORS)
    place.keep(kept, "weights", _name(key, here))
    write_whole(claim / RECORD, json.dumps(encode(here)).encode())
    with place.remote.locked(f"weights-{key}") if place.remote else nullcontext():
        place.keep(claim, "weights", key)
    return _first(place, key) or here


def _name(key: str, load: Load) -> str:
    return f"{key}-{load.weights.removeprefix('sha256:')}"
