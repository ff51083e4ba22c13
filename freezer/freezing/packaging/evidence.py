"""Evidence: every raw latency sample and every drift figure, as Parquet; what was captured and frozen, and each error, as text.

Parquet needs pyarrow; serving does not. Where it is not installed the same columns are written as JSON: nothing is lost.
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
from freezer.freezing.validation.drift import rows_as_columns
from freezer.freezing.validation.judge import Judgement

MAX_TEXT_BYTES = 2_000_000
"""Of one text; what is longer is cut."""

logger = logging.getLogger("coldpress")


def write_evidence(judgement: Judgement, folder: Path) -> tuple[str, ...]:
    """Write evidence/latency.parquet (one row a sample: entrant, round, call, latency_ms; threads, point and payload path of its
    cell) and evidence/drift.parquet (one row a `drift.Row`).

    Returns:
        The paths written, in `folder`. Without pyarrow they end in `.json`, and hold an object of columns.
    """
    (folder / EVIDENCE).mkdir(exist_ok=True)
    latency = _latency(judgement)
    drift = rows_as_columns([row for trial in judgement.trials if trial.drift for row in trial.drift.rows])
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        logger.info("raw evidence is written as JSON, since pyarrow is not installed; pip install 'coldpress[stores]' for Parquet")
        return _write_json(latency, LATENCY_EVIDENCE, folder), _write_json(drift, DRIFT_EVIDENCE, folder)
    pq.write_table(pa.table(latency, schema=_latency_schema(pa)), folder / LATENCY_EVIDENCE)
    pq.write_table(pa.table(drift, schema=_drift_schema(pa)), folder / DRIFT_EVIDENCE)
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
    """Write a table beside where its Parquet file would be; NaN and infinities, which JSON has not, as text. Returns its path."""
    plain = {name: [_plain(value) for value in values] for name, values in columns.items()}
    path = str(Path(path).with_suffix(".json"))
    (folder / path).write_text(json.dumps(plain, allow_nan=False))
    return path


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_texts(candidate: Candidate, folder: Path) -> tuple[str, ...]:
    """Copy the candidate's texts to evidence/: code and graphs, and each error in full.

    Returns:
        The paths written, in `folder`, sorted.
    """
    texts = sorted((candidate.folder / EVIDENCE).glob("*.txt"))
    if texts:
        (folder / EVIDENCE).mkdir(exist_ok=True)
    for source in texts:
        (folder / EVIDENCE / source.name).write_bytes(_cut(source.read_bytes()))
    return tuple(f"{EVIDENCE}/{source.name}" for source in texts)


def _cut(data: bytes) -> bytes:
    """The text, or its whole first lines and one that says how much is left out."""
    if len(data) <= MAX_TEXT_BYTES:
        return data
    kept = data[:MAX_TEXT_BYTES]
    kept = kept[: kept.rfind(b"\n") + 1] or kept.decode(errors="ignore").encode() + b"\n"
    return kept + f"... cut here: {len(data) - len(kept)} of {len(data)} bytes are left out\n".encode()


_LATENCY = {
    **{"entrant": "string", "round": "int32", "call": "int32", "latency_ms": "float64"},
    **{"threads": "int32", "point": "string", "payload": "string"},
}
"""The columns of the latency table, each with Arrow's name of its type."""


def _latency_schema(pa: Any) -> Any:
    return pa.schema([(name, getattr(pa, kind)()) for name, kind in _LATENCY.items()])


def _drift_schema(pa: Any) -> Any:
    text = dict.fromkeys(("recipe", "kind", "output", "problem", "payload"), pa.string())
    counts = dict.fromkeys(("set_index", "num_elements", "num_threads"), pa.int64())
    return pa.schema([(name, (text | counts).get(name, pa.float64())) for name in rows_as_columns([])])
