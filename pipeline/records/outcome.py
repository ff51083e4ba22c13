"""Outcomes of models, and the results that they consist of, as the ledger stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from freezer.artifact import (
    UNMEASURED,
    AccuracyRecord,
    FreezingRecord,
    Measured,
    PointFigures,
    PreviousRecord,
    Tradeoff,
)
from freezer.artifact.explanation import Explanation
from freezer.codec import (
    OMIT_DEFAULT,
    Json,
    JsonView,
    checked_row,
    decode,
    encode,
    frozen,
    stored_as,
)
from freezer.hardware import device_class
from freezer.spec import Clock

SKIPPED = "skipped"
"""Kind of failure of a recipe that is not expected to win."""

_NESTED = ("drift", "latency_ms")
"""Measurements that are objects in stored rows, or null where nothing was measured."""


@frozen
class Failure:
    """Why something failed.

    Attributes:
        kind: type of the failed outcome: `source`, `capture`, `timeout`, `memory`, `crash`, ...
            (docs/reference/contract.md).
        code: error code in docs/reference/errors.md. Rows of earlier releases may lack it.
        message: one sentence for people.
        log_tail: the last lines that the child printed.
        tried_bytes: memory that was not enough, for failures of memory.
        tried_s: time limit that was exceeded, for timeouts.
        starts: number of campaign starts that ended so, with the same `kind` and `tried_s`.
    """

    kind: str = field(metadata=stored_as("failure"))
    code: str | None = None
    message: str = ""
    log_tail: str = ""
    tried_bytes: int | None = None
    tried_s: float | None = field(default=None, metadata=OMIT_DEFAULT)
    starts: int = field(default=1, metadata=OMIT_DEFAULT)

    def counted(self, before: Failure | None) -> Failure:
        """Return the failure with its number of starts, given that of the start before."""
        if before is None or (before.kind, before.tried_s) != (self.kind, self.tried_s):
            return self
        return replace(self, starts=before.starts + 1)


def failure_to_json(failure: Failure | None) -> Json:
    """Return the fields that stored records contain next to their own; of None, the empty ones."""
    return encode(failure) if failure else {**encode(Failure(kind="")), "failure": None}


@frozen
class BuildResult:
    """Result of a build.

    Attributes:
        key: of the build.
        recipe: which recipe was built.
        failure: None if the store contains the candidate.
        wall_s: duration in seconds; of the first build in a child with the start and the loading.
        peak_bytes: largest resident memory of the child and its compilers.
        architecture: digest of the model's; empty if it could not be loaded.
    """

    key: str
    recipe: str
    failure: Failure | None = None
    wall_s: float = 0.0
    peak_bytes: int = 0
    architecture: str = field(default="", metadata=OMIT_DEFAULT)

    @property
    def is_skipped(self) -> bool:
        """Whether it was not built on purpose; the message of `failure` is the reason."""
        return self.failure is not None and self.failure.kind == SKIPPED

    @property
    def problem(self) -> str:
        """Message of the failure; empty without one."""
        return self.failure.message if self.failure else ""

    def to_json(self) -> Json:
        """Return the ledger's form: flat, without the key of its row."""
        data = encode(self) | failure_to_json(self.failure)
        del data["key"]
        return data

    @classmethod
    @checked_row("build")
    def from_row(cls, key: str, data: JsonView) -> BuildResult:
        """Return the result that `to_json` wrote to the row of a key."""
        flat = {**data, "key": key, "failure": data if data["failure"] else None}
        return decode(cls, flat, origin="build row")


@frozen
class OutputDrift:
    """Drift of one output in one input set: the worst of all payloads and thread counts.

    Figures as in DriftRow.
    """

    output: str
    kind: str
    set_index: int
    error_ratio: float | None = None
    max_abs_err: float | None = None
    sqnr_db: float | None = None
    problem: str | None = None


@frozen
class CandidateReport:
    """Result of one recipe.

    Attributes:
        recipe, build_key: which build this is.
        problem: why it was not built or does not pass; None if it passes.
        failure: kind of a failed build, or of what it did to the judge; `skipped`; None if judged.
        capture, lowering: how the graph was captured and turned into payloads.
        tried: attempts for each payload, in order: capture, lowering, and the result in a sentence.
        build_s: wall time of the build, in seconds.
        size_bytes: of all payloads.
        num_payloads: one for each shape and thread count.
        figures: against eager.
        task_metric: the entry's own measure; None if it has none.
        warnings: of the capture.
        strides_equal: whether outputs had eager's strides; None if that was not compared.
        reports: by payload path, the JSON form of FreezingReport, with short lists.
        points: figures of each payload wherever it was timed, the deciding place first.
        accuracy: of a lower precision; None for float32.
        outputs: drift of each output and input set, the worst first; not of earlier releases.
        explanation: where drift that fails the gate enters; None if it passes, or that is unknown.
    """

    recipe: str
    build_key: str
    problem: str | None = None
    failure: str | None = None
    capture: str | None = None
    build_s: float = 0.0
    size_bytes: int = 0
    num_payloads: int = 0
    figures: Measured = UNMEASURED
    task_metric: float | None = None
    warnings: tuple[str, ...] = ()
    lowering: str | None = None
    tried: tuple[Mapping[str, str], ...] = ()
    strides_equal: bool | None = None
    reports: Mapping[str, JsonView] = field(default_factory=dict)
    points: tuple[PointFigures, ...] = ()
    accuracy: AccuracyRecord | None = field(default=None, metadata=OMIT_DEFAULT)
    outputs: tuple[OutputDrift, ...] = field(default=(), metadata=OMIT_DEFAULT)
    explanation: Explanation | None = field(default=None, metadata=OMIT_DEFAULT)

    @property
    def freezing(self) -> FreezingRecord:
        """What its freezing recorded, as in a manifest."""
        data = {name: getattr(self, name) for name in ("warnings", "reports", "strides_equal")}
        return decode(FreezingRecord, data, origin="report")


@frozen
class JudgeFindings:
    """What was found of one model for one device class.

    Attributes:
        verdict: published, kept-eager, kept-previous, rejected, failed, unstable.
        recipe: of the published artifact, or of the candidate that came nearest.
        failure: of the verdict `failed`.
        figures: of `recipe`.
        clock: that they were measured by.
        task_metric: `eager` and the recipe's.
        candidates: one for each recipe.
        pareto: the Pareto front of the candidates that passed the drift gate.
        judge_s: duration of the judge, in seconds.
        previous: the artifact that served then, compared with the new one; None without one.
        deciles_ms: of eager and each timed recipe, the minimum, the nine deciles and the maximum of
            its latencies where `figures` were measured; not of earlier releases.
    """

    verdict: str
    recipe: str | None = None
    failure: Failure | None = None
    figures: Measured = UNMEASURED
    clock: Clock = field(default="wall", metadata=OMIT_DEFAULT)
    task_metric: Mapping[str, float] | None = None
    candidates: tuple[CandidateReport, ...] = ()
    pareto: tuple[Tradeoff, ...] = field(default=(), metadata=OMIT_DEFAULT)
    judge_s: float = 0.0
    previous: PreviousRecord | None = field(default=None, metadata=OMIT_DEFAULT)
    deciles_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict, metadata=OMIT_DEFAULT)


@frozen
class Outcome(JudgeFindings):
    """Outcome of one model for one device class.

    Attributes:
        cached: taken from an earlier campaign; shown to people as "unchanged".
        reason: one sentence for people; of a failed outcome, the message of its failure.
        num_threads: the deciding thread count.
        artifact: digest of the published image manifest.
        version: version of the model that contains the artifact.
        objective: what `recipe` is best in, of the candidates that meet the limits.
        host: where it was judged; recorded, never part of a key.
        source_key, judge_key: see planning/keys.py.
        registered_name: MLflow's registered model for its artifacts; None means `model`.
        tags: of the entry, free; shown in MLflow.
        architecture: of the model, as in BuildResult.
    """

    model: str
    device_class: str
    reason: str | None
    num_threads: int
    source: str
    source_key: str
    judge_key: str
    cached: bool = False
    artifact: str | None = None
    version: int | None = None
    build_s: float = 0.0
    host: JsonView = field(default_factory=dict)
    registered_name: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    architecture: str = field(default="", metadata=OMIT_DEFAULT)
    objective: str = field(default="p50", metadata=OMIT_DEFAULT)

    @property
    def failed(self) -> bool:
        """Whether this outcome makes a campaign's exit code 1."""
        return self.verdict in ("failed", "rejected", "unstable")

    @property
    def has_artifact(self) -> bool:
        """Whether it has an artifact for its class, on GPUs also one that keeps eager."""
        if self.verdict == "kept-eager":
            return device_class(self.device_class).kind == "cuda"
        is_unconfirmed = self.verdict == "unstable" and self.clock == "inherited"
        return self.verdict == "published" or is_unconfirmed

    @property
    def code(self) -> str | None:
        """Error code of a failed or rejected outcome, in docs/reference/errors.md."""
        if self.failure is not None:
            return self.failure.code
        return "CP-DRIFT" if self.verdict == "rejected" else None

    @property
    def failure_kind(self) -> str | None:
        """Type of a failed outcome: source, capture, build, judge, timeout, memory, crash, ..."""
        return self.failure.kind if self.failure else None

    @property
    def log_tail(self) -> str:
        """The last lines of a failed outcome's log."""
        return self.failure.log_tail if self.failure else ""

    @property
    def coded_reason(self) -> str | None:
        """The reason after its code, as people and programs see it."""
        return f"{self.code}: {self.reason}" if self.code and self.reason else self.reason

    @property
    def report(self) -> CandidateReport | None:
        """The report of `recipe`; None if it was not built."""
        return next((item for item in self.candidates if item.recipe == self.recipe), None)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of the capture of `recipe`."""
        return self.report.warnings if self.report else ()

    @property
    def missing(self) -> list[str]:
        """The recipes whose build failed."""
        return [report.recipe for report in self.candidates if report.failure is not None]

    @property
    def reference(self) -> str:
        """Its version in the store."""
        return f"{self.model}:{self.version}"

    @property
    def place(self) -> tuple[str, str]:
        """The model and the device class."""
        return self.model, self.device_class

    @property
    def registered_as(self) -> str:
        """MLflow's registered model for its artifacts."""
        return self.registered_name or self.model

    def to_json(self) -> Json:
        """Return the ledger's form: every field, with failure and figures flat among them."""
        return flat_json(self) | {"code": self.code}

    @classmethod
    @checked_row("outcome")
    def from_json(cls, data: JsonView) -> Outcome:
        """Return the outcome that `to_json` wrote, also after a pass through JSON text."""
        return decode(cls, nested_json(data), origin="outcome")


def flat_json(record: Any) -> Json:
    """Return an Outcome or JudgeResult in JSON, flat; `reason` is the failure's message."""
    data = encode(record) | failure_to_json(record.failure)
    del data["message"]
    for part in (data, *data["candidates"]):
        part.update(part.pop("figures"))
        for name in _NESTED:
            if all(value is None for value in part[name].values()):
                part[name] = None
    return data


def nested_json(data: JsonView) -> Json:
    """Return what `flat_json` wrote as the codec reads it, which ignores unknown keys."""
    failure = {**data, "message": data["reason"]} if data["failure"] else None
    candidates = [{**part, "figures": _measured_json(part)} for part in data["candidates"]]
    return {**data, "failure": failure, "figures": _measured_json(data), "candidates": candidates}


def _measured_json(part: JsonView) -> Json:
    """Return the JSON form of `Measured` in a stored row, where None means not measured."""
    measured = {name: part.get(name) for name in ("speedup", "speedup_ci", *_NESTED)}
    return {name: value for name, value in measured.items() if value is not None}
