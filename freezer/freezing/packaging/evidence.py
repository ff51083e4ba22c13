"""Files beside the payloads: golden files for the canary and `verify`, and the evidence.

The evidence is every latency sample and drift figure as Parquet (without pyarrow as JSON), and
captured and frozen models, and errors, as text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path
from traceback import format_exception

from torch import Tensor

from freezer.artifact import (
    GOLDEN_EAGER,
    GOLDEN_INPUTS,
    GOLDEN_OUTPUTS,
    MANIFEST,
    GoldenSet,
    payload_at,
    payloads_for_threads,
    thread_counts_of,
    torch_folder,
)
from freezer.codec import finite
from freezer.compare import Slices
from freezer.files import make_folder
from freezer.freezing.candidates import EVIDENCE, Builds, Candidate
from freezer.freezing.drift import Call, DriftRow, Reference
from freezer.freezing.judging import Judgement, Session, Trial
from freezer.freezing.models import Subject
from freezer.runtime.tensor_files import save_tensors
from freezer.runtime.tensors import comparable, leaves_of, tensors_bytes, values_of

GOLDEN_BYTES = 8 * 1024 * 1024
"""Limit on the size of the golden inputs; at least one set for each payload is kept."""

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

_Rows = list[dict[str, object]]
"""Cells by column."""


def write_tables(judgement: Judgement, folder: Path) -> None:
    """Write latency.parquet (a row per sample) and drift.parquet (a row per `DriftRow`) to an
    existing folder. Without pyarrow they end in `.json` and contain an object of columns, with null
    for NaN and infinities.
    """
    tables = (
        ("latency", _LATENCY, _latency(judgement)),
        ("drift", _DRIFT, [asdict(row) for trial in judgement.trials for row in trial.drift.rows]),
    )
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        for name, types, rows in tables:
            columns = {column: list(map(itemgetter(column), rows)) for column in types}
            (folder / f"{name}.json").write_text(json.dumps(finite(columns)))
        return
    for name, types, rows in tables:
        table = pa.Table.from_pylist(rows, schema=pa.schema(types))
        pq.write_table(table, folder / f"{name}.parquet")


def _latency(judgement: Judgement) -> _Rows:
    rows = []
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
                for call, latency_ms in enumerate(block):
                    rows.append({**same, "call": call, "latency_ms": latency_ms})
    return rows


def write_texts(candidate: Path, folder: Path) -> None:
    """Copy the code, graphs and errors from the folder of a candidate to a folder."""
    make_folder(folder)
    for text in (candidate / EVIDENCE).glob("*.txt"):
        shutil.copyfile(text, folder / text.name)


def evidence_of(out: Path) -> Path:
    """The folder beside an artifact folder for the evidence of what was not frozen."""
    return out.with_name(f"{out.name}.evidence")


def clear_evidence(out: Path, classes: Sequence[str]) -> None:
    """Remove what an earlier freeze wrote beside `out`: the artifact that needs torch alone, and
    the evidence of these classes; nothing else in that folder is ours.
    """
    for name in classes:
        shutil.rmtree(evidence_of(out) / name, ignore_errors=True)
    if (torch_folder(out) / MANIFEST).is_file():
        shutil.rmtree(torch_folder(out))
    with suppress(OSError):
        evidence_of(out).rmdir()


def write_refused(
    judgement: Judgement | None,
    builds: Builds,
    folder: Path,
    class_name: str,
) -> Path | None:
    """Write the evidence of what is in no artifact of a class to `folder/CLASS`.

    Args:
        judgement: of the candidates; None if there was none.
        builds: all builds of the class. Their texts are copied to a folder for each recipe, the
            errors to `errors.txt`.
        folder: see `evidence_of`.
        class_name: name of the device class.

    Returns:
        The folder; None if everything is in the artifact of the winner.
    """
    won = judgement is not None and judgement.winner is not None
    if won and not builds.errors:
        return None
    dest = folder / class_name
    dest.mkdir(parents=True)
    if judgement is not None and not won:
        write_tables(judgement, dest)
    for recipe, build in builds.folders.items():
        write_texts(build, dest / recipe)
    for trial in judgement.trials if judgement else ():
        if trial.explanation is not None:
            of_recipe = dest / trial.recipe
            make_folder(of_recipe)
            (of_recipe / "explained.txt").write_text(trial.explanation.text())
            (of_recipe / "explained.svg").write_text(trial.explanation.svg())
    if builds.errors:
        texts = [
            f"{name}\n{''.join(format_exception(error))}" for name, error in builds.errors.items()
        ]
        (dest / "errors.txt").write_text("\n".join(texts))
    return folder


def write_golden(
    session: Session, winner: Trial, indices: Sequence[int], folder: Path
) -> tuple[GoldenSet, ...]:
    """Write golden/inputs.safetensors and golden/outputs.safetensors.

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
    if winner.accuracy is not None:  # the canary knows the error of each output alone
        scales, slice_errors = {}, {}
    inputs = {}
    outputs = {}
    sets = []
    for position, index in enumerate(indices):
        for name, tensor in subject.on_host.sets[index].tensors.items():
            inputs[f"{position}/{name}"] = tensor
        for name, tensor in zip(names, _golden_outputs(reference.singles[index]), strict=True):
            outputs[f"{position}/{name}"] = tensor
        sets.append(
            GoldenSet(
                point=subject.sets[index].point,
                native_rmse=_native_rmse(winner, index),
                scales=scales,
                slice_errors=slice_errors,
            )
        )
    save_tensors(inputs, folder / GOLDEN_INPUTS)
    save_tensors(outputs, folder / GOLDEN_OUTPUTS)
    return tuple(sets)


def write_eager(session: Session, folder: Path) -> list[str]:
    """Write eager's answers on the judged samples, with which `verify` judges a budget again;
    return the paths, none where they are larger than GOLDEN_BYTES.
    """
    assert session.budget is not None, "a lower precision has a budget"
    answers = {}
    judged = [inputs for inputs, _ in session.budget.held_out.judged]
    for index, answer in enumerate(session.budget.eager(judged)):
        for name, tensor in zip(session.output_names, leaves_of(answer), strict=True):
            answers[f"{index}/{name}"] = tensor
    if tensors_bytes(answers.values()) > GOLDEN_BYTES:
        return []
    save_tensors(answers, folder / GOLDEN_EAGER)
    return [GOLDEN_EAGER]


def _golden_outputs(call: Call) -> list[Tensor]:
    """The reference, cast to the outputs' dtypes; eager's where it returns NaN, Inf or integers."""
    golden = []
    for r, e in zip(call.reference, call.eager, strict=True):
        both_finite = e.isfinite() & r.isfinite()
        golden.append(r.to(e.dtype).where(both_finite, e) if comparable(e) else e)
    return golden


def _native_rmse(winner: Trial, index: int) -> dict[str, float]:
    """Eager's own error of each output in the single call with an input set; that of a lower
    precision, whose error on another machine is about the same.
    """
    errors: dict[str, float] = {}
    for row in winner.drift.rows:
        error = row.native_rmse
        if winner.accuracy is not None and row.rmse is not None:
            error = max(row.rmse, errors.get(row.output, 0.0))
        if row.kind == "single" and row.set_index == index and error is not None:
            errors[row.output] = error
    return errors


def _slice_errors(
    names: Sequence[str], reference: Reference, indices: Sequence[int]
) -> dict[str, float]:
    """See `GoldenSet.slice_errors`."""
    if not reference.float64 or not reference.deterministic:
        return {}
    calls = [reference.singles[index] for index in indices]
    errors = {}
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
    counts = thread_counts_of(candidate.payloads) or (0,)
    sizes = [tensors_bytes(inputs.tensors.values()) for inputs in subject.sets]
    chosen = []
    points = []
    served: set[str] = set()
    total = 0
    for index in sorted(range(len(sizes)), key=sizes.__getitem__):
        point = subject.sets[index].point
        if point in points:
            continue
        points.append(point)
        payloads = [
            payload_at(payloads_for_threads(candidate.payloads, count), point) for count in counts
        ]
        serves = {payload.path for payload in payloads if payload is not None}
        if not serves <= served or total + sizes[index] <= GOLDEN_BYTES:
            chosen.append(index)
            served |= serves
            total += sizes[index]
    return sorted(chosen)
