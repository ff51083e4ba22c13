"""A candidate: the payloads that one recipe made of one model, with what was recorded while building them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from freezer.artifact.freezing_report import FreezingReport
from freezer.artifact.manifest import Payload
from freezer.artifact.payload_selection import set_for
from freezer.codec import decode, encode
from freezer.freezing.models.subject import Subject
from freezer.runtime.frozen_model import CallOptions, FrozenModel
from freezer.runtime.payloads import LOADERS, OpenPayload

CANDIDATE = "candidate.json"

EVIDENCE = "evidence"
"""The folder of a candidate that holds texts: of each error in full, and of what the lowerings made."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What one recipe made of one model for one device class: a folder of payloads, and how they came to be.

    Attributes:
        folder: holds candidate.json and payloads/.
        recipe, lowering, capture: names.
        tried: for each way that was tried, in order: its payload, capture and lowering, its outcome in a sentence, and where it
            failed the file with the whole error.
        payloads: by thread count, in the order of the target; of one count the most special shapes first.
        reports: by payload path, what freezing did.
        warnings: what the capture said.
        toolchain: versions that made it.
        weights: digest of the weights that it was made of.
        preserve: attributes and methods that the payload still has, the reset method among them.
        build_s: wall time of the whole build, in seconds.
    """

    folder: Path
    recipe: str
    lowering: str
    capture: str
    settings: Mapping[str, Any]
    tried: tuple[Mapping[str, str], ...]
    payloads: tuple[Payload, ...]
    reports: Mapping[str, FreezingReport]
    warnings: tuple[str, ...]
    toolchain: Mapping[str, Any]
    weights: str
    build_s: float
    preserve: tuple[str, ...] = ()

    def open(self, subject: Subject, payloads: Sequence[Payload] | None = None) -> FrozenModel:
        """The candidate as it would be served, in its initial state.

        Args:
            subject: that it was made of, on the device that it should run on.
            payloads: of it, those to choose from by shape; by default all for the thread count that comes first.
        """
        chosen = set_for(self.payloads, self.payloads[0].num_threads or 0) if payloads is None else payloads
        opened = [OpenPayload(payload=p, run=LOADERS[p.kind](self.folder / p.path, self.settings, subject.device)) for p in chosen]
        return FrozenModel(
            spec=subject.spec,
            outputs=subject.outputs,
            structure=subject.structure,
            payloads=opened,
            options=CallOptions(preserve=self.preserve, device=subject.device),
        )

    def write(self) -> None:
        """Write candidate.json beside the payloads."""
        record = {
            "recipe": self.recipe,
            "lowering": self.lowering,
            "capture": self.capture,
            "settings": dict(self.settings),
            "tried": [dict(item) for item in self.tried],
            "payloads": [encode(payload) for payload in self.payloads],
            "reports": {path: encode(report) for path, report in self.reports.items()},
            "warnings": list(self.warnings),
            "toolchain": dict(self.toolchain),
            "weights": self.weights,
            "build_s": self.build_s,
            "preserve": list(self.preserve),
        }
        (self.folder / CANDIDATE).write_text(json.dumps(record, indent=1, sort_keys=True))

    @classmethod
    def read(cls, folder: Path) -> Candidate:
        """The candidate that `write` wrote; raises FileNotFoundError where there is none.

        Fields that are no more are passed over: a store keeps candidates of earlier versions.
        """
        known = {field.name for field in fields(cls)}
        record = {name: value for name, value in json.loads((folder / CANDIDATE).read_text()).items() if name in known}
        payloads = tuple(decode(Payload, item, origin=str(folder / CANDIDATE)) for item in record["payloads"])
        lists = {name: tuple(record[name]) for name in ("tried", "warnings", "preserve")}
        reports = {path: decode(FreezingReport, item, origin=str(folder / CANDIDATE)) for path, item in record["reports"].items()}
        return cls(folder=folder, **{**record, **lists, "payloads": payloads, "reports": reports})
