"""Judging: trials of candidates, timed cells, the incumbent, and the verdict.

Read first: judge.py.
"""

from freezer.freezing.judging.cold_start import (
    Opening,
    measure,
)
from freezer.freezing.judging.eager_check import (
    debug,
)
from freezer.freezing.judging.incumbent import (
    Incumbent,
)
from freezer.freezing.judging.session import (
    Judgement,
    TaskMetric,
    judge,
)
from freezer.freezing.judging.timed_cells import (
    CAPTURED,
    Cell,
    figures_of,
    kept,
    time_further_threads,
    time_sizes,
)
from freezer.freezing.judging.trials import (
    Trial,
    run_trial,
)

__all__ = [
    "CAPTURED",
    "Cell",
    "Incumbent",
    "Judgement",
    "Opening",
    "TaskMetric",
    "Trial",
    "debug",
    "figures_of",
    "judge",
    "kept",
    "measure",
    "run_trial",
    "time_further_threads",
    "time_sizes",
]
