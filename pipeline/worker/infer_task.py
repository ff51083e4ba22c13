"""Infer the inputs of transformers models from their classes and configs, and check their calls, in
a child, before a campaign starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from freezer.codec import encode
from freezer.errors import CatalogError, ColdpressError, SourceError
from freezer.files import digest_bytes, scratch_folder
from freezer.spec import Limits, declared_spec
from pipeline.catalog import Entry
from pipeline.worker.sandbox import run_isolated
from pipeline.worker.task_child import LOG, bounds_of

Answer = Mapping[str, Any] | ColdpressError | None
"""Inferred inputs, the error of what a freeze would refuse, or None."""


def infer_inputs(
    entries: Sequence[Entry], known: dict[str, str], note: Callable[[str], None]
) -> tuple[list[Entry], list[CatalogError]]:
    """Return the entries, with inputs where those of transformers models are not declared, and the
    errors of those that a freeze would refuse.

    Args:
        entries: of the catalog.
        known: remembers answers by key, and is added to.
        note: called with what was inferred, in the form of a catalog.
    """
    keys = {entry.name: _key(entry) for entry in entries if _is_asked(entry)}
    new = [entry for entry in entries if keys.get(entry.name, "") not in {"", *known}]
    answers = dict(zip([entry.name for entry in new], _ask(new), strict=True)) if new else {}
    usable: list[Entry] = []
    problems: list[CatalogError] = []
    for entry in entries:
        answer = answers.get(entry.name)
        if isinstance(answer, ColdpressError):
            field = "source" if isinstance(answer, SourceError) else "inputs"
            problem = CatalogError(str(answer), entry=entry.name, field=field, code=answer.code)
            problems.append(problem)
            continue
        key = keys.get(entry.name, "")
        if entry in new:
            known[key] = json.dumps(answer)
        declared = json.loads(known.get(key, "null"))
        if declared:
            note(f"{entry.name}: inferred from its class and config:")
            for name, value in declared.items():
                note(f"{name}: {json.dumps(value)}")
            usable.append(replace(entry, spec=declared_spec(**declared)))
        else:
            usable.append(entry)
    return usable, problems


def _is_asked(entry: Entry) -> bool:
    return entry.source.kind == "transformers" and not isinstance(entry.samples, str)


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
            folder=Path(folder),
            log=Path(folder, LOG),
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
