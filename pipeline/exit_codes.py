"""Exit codes of `jobs.*`, documented in docs/contract.md. jobs/exits.py maps errors to them."""

OK = 0
FAILED = 1
"""An outcome is failed, rejected or unstable."""

USAGE = 2
"""The request is invalid; nothing was started."""

INFRASTRUCTURE = 3
"""Ray, MLflow or the store failed."""

INTERRUPTED = 130
"""Stopped by a person; 128 plus the number of SIGINT."""
