"""Evidence: every latency sample and drift figure as Parquet; captured and frozen models, and errors, as text.

Without pyarrow the same columns are written as JSON.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freezer.artifact.folder import DRIFT_EVIDENCE, LATENCY_EVIDENCE
from freezer.freezing.candidates.candidate import EVIDENCE, Candidate
from freezer.freezing.validation.drift import DriftRow, rows_as_columns
from freezer.freezing.validation.judge import Judgement

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
    **dict.fromkeys(("set_index", "num_elements", "num_threads"), "int64"),
}
"""Columns of the drift table, likewise."""

logger = logging.getLogger("coldpress")


def write_evidence(judgement: Judgement, folder: Path) -> tuple[str, ...]:
    """Write evidence/latency.parquet (a row per sample) and evidence/drift.parquet (a row per `DriftRow`).

    Returns:
        The paths written, relative to `folder`. Without pyarrow they end in `.json` and contain an object of columns.
    """
    (folder / EVIDENCE).mkdir(exist_ok=True)
    drift = rows_as_columns([row for trial in judgement.trials if trial.drift for row in trial.drift.rows])
    tables = ((LATENCY_EVIDENCE, _LATENCY, _latency(judgement)), (DRIFT_EVIDENCE, _DRIFT, drift))
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        logger.info("pyarrow is not installed; writing evidence as JSON (pip install 'coldpress[stores]' for Parquet)")
        return tuple(_write_json(columns, path, folder) for path, _, columns in tables)
    for path, types, columns in tables:
        schema = pa.schema([(name, getattr(pa, kind)()) for name, kind in types.items()])
        pq.write_table(pa.table(columns, schema=schema), folder / path)
    return LATENCY_EVIDENCE, DRIFT_EVIDENCE


def _latency(judgement: Judgement) -> dict[str, list[Any]]:
    """The latency table: a list for each column."""
    latency: dict[str, list[Any]] = {name: [] for name in _LATENCY}
    for cell in judgement.cells:
        point = ", ".join(f"{name}={size}" for name, size in cell.point.items())
        for entrant, rounds in cell.sampling.samples_ms.items():
            where = {"threads": cell.num_threads, "point": point, "payload": cell.payloads.get(entrant), "entrant": entrant}
            for round_index, block in enumerate(rounds):
                for name, value in {**where, "round": round_index}.items():
                    latency[name] += [value] * len(block)
                latency["call"] += range(len(block))
                latency["latency_ms"] += block
    return latency


def _write_json(columns: Mapping[str, list[Any]], path: str, folder: Path) -> str:
    """Write a table as JSON, with NaN and infinities as strings; return its path."""
    plain = {
        name: [str(value) if isinstance(value, float) and not math.isfinite(value) else value for value in values]
        for name, values in columns.items()
    }
    path = str(Path(path).with_suffix(".json"))
    (folder / path).write_text(json.dumps(plain, allow_nan=False))
    return path


def write_texts(candidate: Candidate, folder: Path) -> tuple[str, ...]:
    """Copy the candidate's code, graphs and errors to evidence/.

    Returns:
        The paths written, relative to `folder`, sorted.
    """
    texts = sorted((candidate.folder / EVIDENCE).glob("*.txt"))
    (folder / EVIDENCE).mkdir(exist_ok=True)
    for source in texts:
        (folder / EVIDENCE / source.name).write_bytes(_cut(source.read_bytes()))
    return tuple(f"{EVIDENCE}/{source.name}" for source in texts)


def _cut(data: bytes) -> bytes:
    """Cut a long text after a whole line, and append how much is missing."""
    if len(data) <= MAX_TEXT_BYTES:
        return data
    kept = data[:MAX_TEXT_BYTES]
    kept = kept[: kept.rfind(b"\n") + 1] or kept.decode(errors="ignore").encode() + b"\n"
    return kept + f"... cut here: {len(data) - len(kept)} of {len(data)} bytes are left out\n".encode()
