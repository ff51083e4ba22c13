"""Checks of a machine for the command `coldpress doctor`: what would stop somebody who freezes or
serves here.

May import: freezer.freezing, freezer.serving and below. A checkout adds checks of Ray and MLflow by
the entry-point group `coldpress.checks`. Read first: machine_checks.py.
"""

from freezer.checks.machine_checks import CheckRequest, Finding, run_checks

__all__ = ["CheckRequest", "Finding", "run_checks"]
