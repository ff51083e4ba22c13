"""Timing: sample latency and measure how much other processes disturb it.

May import: freezer.runtime and below.
Read first: sampling.py.
"""

from freezer.timing.intervals import Rivals
from freezer.timing.meters import meter_of
from freezer.timing.samples import MIN_SAMPLES, Sampling, Speedup, over_processes, speedup
from freezer.timing.sampling import policy_for, sample
from freezer.timing.sharing import alone, brief_waits, share_machine

__all__ = [
    "MIN_SAMPLES",
    "Rivals",
    "Sampling",
    "Speedup",
    "alone",
    "brief_waits",
    "meter_of",
    "over_processes",
    "policy_for",
    "sample",
    "share_machine",
    "speedup",
]
