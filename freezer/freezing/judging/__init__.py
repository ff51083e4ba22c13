"""Judging: trials of candidates, timed cells, the incumbent, and the verdict.

Read first: steps.py.
"""

from freezer.freezing.judging.cold_start import with_cold_start
from freezer.freezing.judging.judgement import CAPTURED, Cell, Incumbent, Judgement, Trial
from freezer.freezing.judging.payload_gains import kept_payloads, point_figures
from freezer.freezing.judging.session import (
    Session,
    TaskMetric,
    for_portable,
    open_session,
)
from freezer.freezing.judging.steps import judge
from freezer.freezing.judging.timed_cells import (
    confirm_inherited,
    time_further_threads,
    time_sizes,
    with_figures,
)
from freezer.freezing.judging.trials import run_trial
from freezer.freezing.judging.verdicts import over_footprint, ranked, refuse_contradicted

__all__ = [
    "CAPTURED",
    "Cell",
    "Incumbent",
    "Judgement",
    "Session",
    "TaskMetric",
    "Trial",
    "confirm_inherited",
    "for_portable",
    "judge",
    "kept_payloads",
    "open_session",
    "over_footprint",
    "point_figures",
    "ranked",
    "refuse_contradicted",
    "run_trial",
    "time_further_threads",
    "time_sizes",
    "with_cold_start",
    "with_figures",
]
