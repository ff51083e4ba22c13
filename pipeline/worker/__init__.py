"""Worker: the tasks that run on a node, the sandbox, its supervisor and its child.

May import: pipeline.sources and below.
Read first: build_task.py, then judge_task.py.
"""

from pipeline.worker.build_task import (
    build,
)
from pipeline.worker.judge_task import (
    judge,
)
from pipeline.worker.previous import check_portable
from pipeline.worker.requests import (
    BuildRequest,
    BuildResult,
    JudgeRequest,
    JudgeResult,
)
from pipeline.worker.task_child import (
    bounds_of,
    infer_inputs,
    probe,
)

__all__ = [
    "BuildRequest",
    "BuildResult",
    "JudgeRequest",
    "JudgeResult",
    "bounds_of",
    "build",
    "check_portable",
    "infer_inputs",
    "judge",
    "probe",
]
