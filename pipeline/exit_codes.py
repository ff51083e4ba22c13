"""Exit codes of `jobs.*`, as docs/contract.md has them for scripts. What an error of ours ends in: jobs/exits.py."""

OK = 0
FAILED = 1
"""Some outcome is failed or rejected."""

USAGE = 2
"""What was asked for cannot be done as asked; nothing was started."""

INFRASTRUCTURE = 3
"""Ray, MLflow or the store failed."""

INTERRUPTED = 130
"""A person has stopped it; 128 and SIGINT's number, as shells have it."""
