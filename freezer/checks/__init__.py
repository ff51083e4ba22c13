"""Checks of a machine for the command `coldpress doctor`: torch, compiler, hardware, limits,
neighbours and the store.

May import: freezer.freezing, freezer.serving and below. A checkout adds checks of Ray and MLflow by
the entry-point group `coldpress.checks`. Read first: run_checks.py.
"""
