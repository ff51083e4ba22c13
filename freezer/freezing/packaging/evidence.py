"""Files beside the payloads: golden files for the canary and `verify`, and the evidence.

The evidence is every latency sample and drift figure as Parquet (without pyarrow as JSON), and
captured and frozen models, and errors, as text.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from freezer.artifact import (
    DRIFT_EVIDENCE,
    GOLDEN_INPUTS,
    GOLDEN_OUTPUTS,
    LATENCY_EVIDENCE,
    MANIFEST,
    GoldenSet,
    payload_at,
    payloads_for_threads,
    thread_counts_of,
    torch_folder,
)
from freezer.compare import Slices
from freezer.compare.tensor_values import comparable, values_of
from freezer.freezing.candidates import EVIDENCE, Candidate
from freezer.freezing.drift import DriftRow, Reference
from freezer.freezing.judging import Judgement, Session, Trial
from freezer.freezing.models import Subject
from freezer.runtime.tensor_files import save_tensors

GOLDEN_BYTES = 8 * 1024 * 1024
"""Limit on the size of the golden inputs; at least one set for each payload is kept."""

MAX_TEXT_BYTES = 2_000_000
"""Longer texts are cut."""

_LATENCY = {
    "entrant": "string",
    "round": "int32",
    "call": "int32",
    "latency_ms": "float64",
    "threads": "int32",
    "point": "string",
    "payload": "string",
}
"""Columns of the latency table, with the Arrow names of their types."""

_DRIFT = {
    **dict.fromkeys(DriftRow.__dataclass_fields__, "float64"),
    **dict.fromkeys(("recipe", "kind", "output", "problem", "payload"), "string"),
    **dict.fromkeys(("set_index", "num_elements", "num_threads", "num_ties"), "int64"),
}
"""Columns of the drift table, likewise."""

_Table = dict[str, list[object]]
"""A list for each column."""

logger = logging.getLogger("coldpress")


def write_evidence(judgement: Judgement, folder: Path) -> tuple[str, ...]:
    """Write evidence/latency.parquet (a row per sample) and evidence/drift.parquet (a row per
    `DriftRow`).

    Returns:
        The paths written, relative to `folder`. Without pyarrow they end in `.json` and contain an
        object of columns.
    """
    (folder / EVIDENCE).mkdir(exist_ok=True)
    rows = [row for trial in judgement.trials if trial.drift for row in trial.drift.rows]
    drift: _Table = {}
    for name in _DRIFT:
        drift[name] = [getattr(row, name) for row in rows]
    tables = ((LATENCY_EVIDENCE, _LATENCY, _latency(judgement)), (DRIFT_EVIDENCE, _DRIFT, drift))
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        logger.info(
            "pyarrow is not installed; writing evidence as JSON (pip install 'coldpress[stores]'"
            " for Parquet)"
        )
        return tuple(_write_json(columns, path, folder) for path, _, columns in tables)
    for path, types, columns in tables:
        schema = pa.schema([(name, getattr(pa, kind)()) for name, kind in types.items()])
        pq.write_table(pa.table(columns, schema=schema), folder / path)
    return LATENCY_EVIDENCE, DRIFT_EVIDENCE


def _latency(judgement: Judgement) -> _Table:
    """The latency table: a list for each column."""
    table: _Table = {name: [] for name in _LATENCY}
    for cell in judgement.cells:
        point = ", ".join(f"{name}={size}" for name, size in cell.point.items())
        for entrant, rounds in cell.sampling.samples_ms.items():
            for round_index, block in enumerate(rounds):
                same = {
                    "threads": cell.num_threads,
                    "point": point,
                    "payload": cell.payloads.get(entrant),
                    "entrant": entrant,
                    "round": round_index,
                }
                for name, value in same.items():
                    table[name] += [value] * len(block)
                table["call"] += range(len(block))
                table["latency_ms"] += block
    return table


def _write_json(columns: _Table, path: str, folder: Path) -> str:
    """Write a table as JSON, with NaN and infinities as strings; return its path."""
    plain = {name: list(map(_plain, values)) for name, values in columns.items()}
    path = str(Path(path).with_suffix(".json"))
    (folder / path).write_text(json.dumps(plain, allow_nan=False))
    return path


def _plain(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_texts(candidate: Candidate, folder: Path) -> tuple[str, ...]:
    """Copy the code, graphs and errors of a candidate to evidence/.

    Returns:
        The paths written, relative to `folder`, sorted.
    """
    texts = sorted((candidate.folder / EVIDENCE).glob("*.txt"))
    (folder / EVIDENCE).mkdir(exist_ok=True)
    for source in texts:
        (folder / EVIDENCE / source.name).write_bytes(_cut(source.read_bytes()))
    return tuple(sorted(f"{EVIDENCE}/{source.name}" for source in texts))


def evidence_of(out: Path) -> Path:
    """The folder beside an artifact folder for the evidence of what was not frozen."""
    return out.with_name(f"{out.name}.evidence")


def clear_evidence(out: Path, classes: Sequence[str]) -> None:
    """Remove what an earlier freeze wrote beside `out`: the artifact that needs torch alone, and
    the evidence of these classes; nothing else in that folder is ours.
    """
    for name in classes:
        shutil.rmtree(evidence_of(out) / name, ignore_errors=True)
    (evidence_of(out) / "errors.txt").unlink(missing_ok=True)
    if (torch_folder(out) / MANIFEST).is_file():
        shutil.rmtree(torch_folder(out))
    with suppress(OSError):
        evidence_of(out).rmdir()


def write_refused(
    judgement: Judgement | None,
    builds: Mapping[str, Path],
    tracebacks: Mapping[str, str],
    work: Path,
    dest: Path,
) -> None:
    """Write the evidence of a class for which no artifact is written.

    Args:
        judgement: of the candidates; None if there was none.
        builds: folder of each recipe's build, also of those that failed; their texts are copied to
            `dest/RECIPE`.
        tracebacks: by recipe; written to `dest/errors.txt`.
        work: an existing folder for files in progress.
        dest: a new folder.
    """
    dest.mkdir(parents=True)
    if judgement is not None:
        write_evidence(judgement, work)
        for table in (work / EVIDENCE).iterdir():
            shutil.copy(table, dest / table.name)
    for recipe, folder in builds.items():
        for text in sorted((folder / EVIDENCE).glob("*.txt")):
            (dest / recipe).mkdir(exist_ok=True)
            (dest / recipe / text.name).write_bytes(_cut(text.read_bytes()))
    if tracebacks:
        (dest / "errors.txt").write_text(
            "\n".join(f"{name}\n{text}" for name, text in tracebacks.items())
        )


def _cut(data: bytes) -> bytes:
    """Cut a long text after a whole line, and append how much is missing."""
    if len(data) <= MAX_TEXT_BYTES:
        return data
    kept = data[:MAX_TEXT_BYTES]
    kept = kept[: kept.rfind(b"\n") + 1] or kept.decode(errors="ignore").encode() + b"\n"
    return (
        kept + f"... cut here: {len(data) - len(kept)} of {len(data)} bytes are left out\n".encode()
    )


def write_golden(
    session: Session, winner: Trial, indices: Sequence[int], folder: Path
) -> tuple[GoldenSet, ...]:
    """Write golden/inputs.safetensors and golden/outputs.safetensors.

    Golden outputs are the reference, cast to the output's dtype. Where eager returns NaN, Inf or
    integers, they are eager's.

    Args:
        session: the session of the judgement.
        winner: the winner; its answers at ties replace the reference's.
        indices: indices of the input sets to write.
        folder: folder of the artifact.
    """
    (folder / "golden").mkdir()
    subject, names = session.subject, session.output_names
    reference = replace(session.reference, calls=winner.ties or session.reference.calls)
    scales = {name: limits for name, limits in zip(names, reference.scales, strict=True) if limits}
    slice_errors = _slice_errors(names, reference, indices)
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    sets: list[GoldenSet] = []
    for position, index in enumerate(indices):
        call = reference.singles[index]
        for name, tensor in subject.on_host.sets[index].tensors.items():
            inputs[f"{position}/{name}"] = tensor
        for name, r, e in zip(
            names,
            call.reference,
            call.eager,
            strict=True,
        ):
            golden = r.to(e.dtype).where(e.isfinite() & r.isfinite(), e) if comparable(e) else e
            outputs[f"{position}/{name}"] = golden
        sets.append(
            GoldenSet(
                point=dict(subject.sets[index].point),
                native_rmse=_native_rmse(winner, index),
                scales=scales,
                slice_errors=slice_errors,
            )
        )
    save_tensors(inputs, folder / GOLDEN_INPUTS)
    save_tensors(outputs, folder / GOLDEN_OUTPUTS)
    return tuple(sets)


def _native_rmse(winner: Trial, index: int) -> dict[str, float]:
    """Eager's own error of each output in the single call with an input set."""
    assert winner.drift is not None, "a winner has passed the drift gate"
    return {
        row.output: row.native_rmse
        for row in winner.drift.rows
        if row.kind == "single" and row.set_index == index and row.native_rmse is not None
    }


def _slice_errors(
    names: Sequence[str], reference: Reference, indices: Sequence[int]
) -> dict[str, float]:
    """See `GoldenSet.slice_errors`."""
    if not reference.float64 or not reference.deterministic:
        return {}
    calls = [reference.singles[index] for index in indices]
    errors: dict[str, float] = {}
    for number, name in enumerate(names):
        slices = Slices(reference.scales[number])
        for call in calls:
            if comparable(call.eager[number]):
                eager = values_of(call.eager[number])
                slices.add(values_of(call.reference[number]), eager, eager)
        share = slices.native_share()
        if share is not None:
            errors[name] = share
    return errors


def golden_indices(subject: Subject, candidate: Candidate) -> list[int]:
    """Select the first set at each point, the smallest first, within GOLDEN_BYTES; always one for
    each payload.
    """
    first: dict[tuple[tuple[str, int], ...], int] = {}
    for index, item in enumerate(subject.sets):
        first.setdefault(tuple(sorted(item.point.items())), index)
    sizes = {}
    for index in first.values():
        sizes[index] = sum(tensor.nbytes for tensor in subject.sets[index].tensors.values())
    payloads = candidate.payloads
    served_by = [
        payloads_for_threads(payloads, count) for count in thread_counts_of(payloads) or (0,)
    ]
    chosen: list[int] = []
    served: set[str] = set()
    total = 0
    for index in sorted(sizes, key=sizes.__getitem__):
        found = [payload_at(held, subject.sets[index].point) for held in served_by]
        serves = {payload.path for payload in found if payload is not None}
        if not serves <= served or total + sizes[index] <= GOLDEN_BYTES:
            chosen.append(index)
            served |= serves
            total += sizes[index]
    return sorted(chosen)
