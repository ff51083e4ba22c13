"""Evidence: every raw latency sample and every drift figure, as Parquet; what was captured and frozen, and each error, as text.

Parquet needs pyarrow; serving does not.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from freezer.artifact import DRIFT_EVIDENCE, LATENCY_EVIDENCE
from freezer.build import EVIDENCE, Candidate
from freezer.drift import rows_as_columns
from freezer.judge import Judgement

MAX_TEXT_BYTES = 2_000_000
"""Of one text; what is longer is cut."""

logger = logging.getLogger("coldpress")


def write_evidence(judgement: Judgement, folder: Path) -> tuple[str, ...]:
    """Write evidence/latency.parquet (one row a sample: entrant, round, call, latency_ms; threads, point and payload path of its
    cell) and evidence/drift.parquet (one row a `drift.Row`).

    Returns:
        The paths written, in `folder`. Without pyarrow none, and a warning says so: the summary stays in the manifest.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        logger.warning("raw evidence is left out: it needs pyarrow; pip install 'coldpress[stores]'")
        return ()
    (folder / EVIDENCE).mkdir(exist_ok=True)
    schema = _latency_schema(pa)
    latency: dict[str, list[Any]] = {name: [] for name in schema.names}
    for cell in judgement.cells:
        point = ", ".join(f"{name}={size}" for name, size in cell.point.items())
        for entrant, rounds in cell.sampling.samples_ms.items():
            where = {"threads": cell.num_threads, "point": point, "payload": cell.payloads.get(entrant), "entrant": entrant}
            for round_index, block in enumerate(rounds):
                for name, value in {**where, "round": round_index}.items():
                    latency[name] += [value] * len(block)
                latency["call"] += range(len(block))
                latency["latency_ms"] += block
    pq.write_table(pa.table(latency, schema=schema), folder / LATENCY_EVIDENCE)
    rows = [row for trial in judgement.trials if trial.drift for row in trial.drift.rows]
    pq.write_table(pa.table(rows_as_columns(rows), schema=_drift_schema(pa)), folder / DRIFT_EVIDENCE)
    return LATENCY_EVIDENCE, DRIFT_EVIDENCE


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


def _latency_schema(pa: Any) -> Any:
    return pa.schema(
        [
            *(("entrant", pa.string()), ("round", pa.int32()), ("call", pa.int32()), ("latency_ms", pa.float64())),
            *(("threads", pa.int32()), ("point", pa.string()), ("payload", pa.string())),
        ]
    )


def _drift_schema(pa: Any) -> Any:
    text = dict.fromkeys(("recipe", "kind", "output", "problem", "payload"), pa.string())
    counts = dict.fromkeys(("set_index", "num_elements", "num_threads"), pa.int64())
    return pa.schema([(name, (text | counts).get(name, pa.float64())) for name in rows_as_columns([])])
