"""One judge, as a worker's task."""

from __future__ import annotations

from pipeline import worker
from pipeline.worker import JudgeRequest, JudgeResult


def judge(request: JudgeRequest) -> JudgeResult:
    """Judge for one class."""
    (result,) = worker.judge(request)
    return result
