"""Run the heavy half of a task in a child, with the limits of its entry; and the tasks that probe a
worker and infer inputs.

Imports no torch; the processes that it starts do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.codec import Json, JsonView, encode
from freezer.errors import CatalogError, ColdpressError, SourceError
from freezer.files import digest_bytes, scratch_folder
from freezer.hardware import available_cpus, device_class, machine_bytes, this_host
from freezer.spec import Limits, declared_spec
from pipeline.catalog import Entry
from pipeline.records import ClassFacts, Note
from pipeline.worker.child import End
from pipeline.worker.requests import Request
from pipeline.worker.sandbox import run_isolated
from pipeline.worker.supervisor import Bounds

if TYPE_CHECKING:
    from freezer.freezing.models import Subject
    from freezer.freezing.target import Target

_MEMORY_SHARE = 0.8
"""Share of the machine's memory that one item may use if its entry sets no limit."""

TRANSFORMERS = "transformers.modeling_utils"
"""Module that takes 1.3 s to import."""


def in_child(
    child: Callable[..., object],
    request: Request,
    staging: Path,
    *args: object,
) -> End:
    """Run a child in a staging folder, where its output is appended to LOG."""
    from_transformers = request.entry.source.kind == "transformers"
    return run_isolated(
        child,
        (request, staging, *args),
        folder=staging,
        bounds=bounds_of(request.entry.limits, request.device_class),
        preload=TRANSFORMERS if from_transformers else "",
    )


def bounds_of(limits: Limits, name: str) -> Bounds:
    """Return the limits of a child: those of the entry, and by default a share of the machine's
    memory.
    """
    memory_bytes = machine_bytes() * _MEMORY_SHARE
    if limits.memory_gb is not None:
        memory_bytes = limits.memory_gb * 1e9
    return Bounds(
        timeout_s=limits.timeout_s,
        memory_bytes=int(memory_bytes),
        asked=limits.memory_gb is not None,
        bounds_requests=device_class(name).kind != "cuda",
    )


def load_subject(entry: Entry, target: Target | None = None) -> Subject:
    """Return the subject of an entry, on the device of the target if given; see
    `freezer.freezing.freeze.load_subject`.
    """
    from freezer.freezing.freeze import load_subject as load
    from freezer.freezing.models import SubjectOptions
    from freezer.runtime.devices import CPU

    options = SubjectOptions(
        preserve=entry.preserve,
        reset=entry.reset,
        points=entry.points,
        fill_up=entry.fill_up,
        device=target.device if target else CPU,
        accuracy=entry.accuracy,
        search_path=entry.search_path,
    )
    return load(
        entry.source,
        entry.name,
        entry.spec,
        Path(entry.samples) if entry.samples else None,
        options,
    )


PROBE_TIMEOUT_S = 120.0


def probe(name: str) -> ClassFacts:
    """Return what this worker builds with.

    Args:
        name: device class; a GPU class adds the names of the driver and the GPU.

    Raises:
        RuntimeError: torch cannot be imported there.
    """
    bounds = bounds_of(Limits(timeout_s=PROBE_TIMEOUT_S), name)
    with scratch_folder() as staging:
        end = run_isolated(
            toolchain_of,
            (name,),
            folder=staging,
            bounds=bounds,
        )
    if end.failure is not None:
        raise RuntimeError(
            f"the worker cannot be probed: {end.failure.message}\n{end.failure.log_tail}"
        )
    return ClassFacts(
        num_threads=available_cpus(),
        toolchain=end.value,
        memory_bytes=bounds.memory_bytes,
        emulated=this_host().emulated,
    )


def toolchain_of(name: str) -> Json:
    """Return the toolchain of a device class on this machine. Imports torch."""
    from freezer.freezing.target import target_here, toolchain

    is_cuda = device_class(name).kind == "cuda"
    return toolchain(target_here(name, 1).device) if is_cuda else toolchain()


Answer = JsonView | ColdpressError | None
"""Inferred inputs, the error of what a freeze would refuse, or None."""


def infer_inputs(
    entries: Sequence[Entry], known: dict[str, str], note: Note
) -> tuple[list[Entry], list[CatalogError]]:
    """Return the entries, with inputs where those of transformers models are not declared, and the
    errors of those that a freeze would refuse.

    Args:
        entries: of the catalog.
        known: remembers answers by key, and is added to.
        note: called with what was inferred, in the form of a catalog.
    """
    keys = {
        entry.name: _key(entry)
        for entry in entries
        if entry.source.kind == "transformers" and not isinstance(entry.samples, str)
    }
    new = [entry for entry in entries if keys.get(entry.name, "") not in {"", *known}]
    problems = {}
    for entry, answer in zip(new, _ask(new) if new else (), strict=True):
        if isinstance(answer, ColdpressError):
            field = "source" if isinstance(answer, SourceError) else "inputs"
            problems[entry.name] = CatalogError(
                str(answer), entry=entry.name, field=field, code=answer.code
            )
        else:
            known[keys[entry.name]] = json.dumps(answer)
    usable = []
    for entry in entries:
        if entry.name in problems:
            continue
        declared = json.loads(known.get(keys.get(entry.name, ""), "null"))
        if declared:
            note(f"{entry.name}: inferred from its class and config:")
            for name, value in declared.items():
                note(f"{name}: {json.dumps(value)}")
            usable.append(replace(entry, spec=declared_spec(**declared)))
        else:
            usable.append(entry)
    return usable, [*problems.values()]


def _key(entry: Entry) -> str:
    """The key of an answer: all that it depends on."""
    config = Path(entry.source.location, "config.json")
    parts = {
        "version": [1, metadata.version("transformers")],
        "entry": [encode(entry.source), entry.spec and encode(entry.spec), str(entry.samples)],
        "config": config.read_text() if config.is_file() else None,
    }
    return digest_bytes(json.dumps(parts).encode())


def _ask(entries: Sequence[Entry]) -> list[Answer]:
    with scratch_folder() as folder:
        end = run_isolated(
            _answers,
            (entries,),
            folder=folder,
            bounds=bounds_of(Limits(), "portable"),
        )
    if end.failure is not None:
        failure = SourceError(f"{end.failure.message}\n{end.failure.log_tail}")
        return [failure for _ in entries]
    answers: list[Answer] = end.value
    return answers


def _answers(entries: Sequence[Entry]) -> list[Answer]:
    """In the child: the answer for each entry."""
    from freezer.freezing.models import inferred_inputs

    answers: list[Answer] = []
    for entry in entries:
        try:
            samples = Path(entry.samples) if entry.samples else None
            answers.append(inferred_inputs(entry.source, entry.spec, samples))
        except ColdpressError as error:
            answers.append(error)
    return answers
