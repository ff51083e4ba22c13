"""Budgets: judge a candidate of a lower precision on held-out samples that neither calibration nor
search has seen. It never meets the drift gate of float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any

from freezer.artifact import AccuracyRecord, Payload
from freezer.codec import frozen
from freezer.freezing.models import Subject, call_source
from freezer.runtime.accuracy import CONFIDENCE
from freezer.runtime.devices import called_on
from freezer.runtime.frozen_model import FrozenModel
from freezer.runtime.held_out import SEED, HeldOut, judge_answers
from freezer.runtime.input_sets import InputSet, resize
from freezer.runtime.tensors import leaves_of, tensors_bytes
from freezer.spec import METRIC

KEPT_BYTES = 256 * 1024 * 1024
"""Most that eager's answers may take to be kept in memory."""


@frozen
class Budget:
    """A budget, and eager's answers on the judged samples.

    Attributes:
        num_candidates: candidates that are judged by it in this session.
    """

    subject: Subject
    held_out: HeldOut
    num_candidates: int = 1
    _kept: dict[str, list[Any]] = field(default_factory=dict)

    def judge(
        self, model: FrozenModel, payload: Payload, precision: str
    ) -> tuple[AccuracyRecord, str | None]:
        """Judge a model with one payload; return the record, and why it does not keep the budget.

        Raises:
            JudgeError: eager does not run, or an answer has no decisions or no quality.
        """
        sets = [_fitting(inputs, payload, self.subject) for inputs, _ in self.held_out.judged]
        call = called_on(model, model.device)
        answers = (call(**inputs.cloned()) for inputs in sets)
        judged = judge_answers(
            self.held_out, self.held_out.judged, self.eager(sets), answers, self.num_candidates
        )
        accuracy = self.held_out.accuracy
        record = AccuracyRecord(
            precision=precision,
            budget=accuracy.budget,
            metric=accuracy.metric,
            labels=accuracy.labels,
            measured=judged.measured,
            bounds=judged.bounds,
            confidence=CONFIDENCE,
            num_candidates=self.num_candidates,
            samples=self.held_out.counts,
            seed=SEED,
            digest=self.held_out.digest,
        )
        return record, judged.problem

    def eager(self, sets: Sequence[InputSet]) -> Iterator[Any]:
        """Eager's answers, which are kept for the next candidate unless they are large."""
        key = str([inputs.point for inputs in sets])
        if key in self._kept:
            yield from self._kept[key]
            return
        model, kept, size = self.subject.on_host.fresh(), [], 0
        for inputs in sets:
            answer = call_source(model, self.subject.spec, inputs.cloned())
            size += tensors_bytes(leaves_of(answer))
            if size <= KEPT_BYTES:
                kept.append(answer)
            yield answer
        if len(kept) == len(sets):
            self._kept[key] = kept


def _fitting(inputs: InputSet, payload: Payload, subject: Subject) -> InputSet:
    """A sample at sizes that a payload takes."""
    if payload.accepts(inputs.point):
        return inputs
    return resize(inputs, subject.spec, payload.first_point)


def worst(records: Sequence[AccuracyRecord]) -> AccuracyRecord:
    """The record of the payload whose bounds are the least safe."""

    def safety(record: AccuracyRecord) -> tuple[float, ...]:
        return tuple(-value if name == METRIC else value for name, value in record.bounds.items())

    return min(records, key=safety)
