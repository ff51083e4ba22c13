"""All checks of `coldpress doctor`, in the order in which their findings are shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points

from freezer.checks.machine_checks import (
    Check,
    CheckRequest,
    Finding,
    check_classes,
    check_compiler,
    check_gpus,
    check_store,
    check_temporary,
    check_torch,
)
from freezer.errors import first_line

CHECKS: Mapping[str, Check] = {
    "device classes": check_classes,
    "temporary folder": check_temporary,
}
"""Checks without torch, by what they check."""

GROUP = "coldpress.checks"
"""Entry points of further checks. The wheel names them too, but contains no code for them."""


def run_checks(request: CheckRequest) -> Iterator[Finding]:
    """Run all checks."""
    findings = list(_run({"torch": check_torch}, request))
    yield from findings
    further, missing = _further()
    yield from _run(CHECKS, request)
    if findings[0].level == "ok":
        yield from _run({"compiler": check_compiler, "GPU": check_gpus}, request)
    yield from missing
    yield from _run({**further, "store": check_store}, request)


def _run(
    checks: Mapping[str, Check],
    request: CheckRequest,
) -> Iterator[Finding]:
    for check in checks.values():
        yield from check(request)


def _further() -> tuple[dict[str, Check], list[Finding]]:
    """The checks of a checkout by name, and findings on those that cannot be imported."""
    checks: dict[str, Check] = {}
    missing = []
    for entry in sorted(
        entry_points(group=GROUP),
        key=lambda entry: entry.name,
        reverse=True,
    ):
        try:
            checks[entry.name] = entry.load()
        except ImportError as error:
            text = f"not installed, and only campaigns need it: {first_line(error)}"
            missing.append(Finding(entry.name, text))
    return checks, missing
