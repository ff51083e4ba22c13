"""All checks of `coldpress doctor`, in the order in which their findings are shown."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import entry_points

from freezer.checks.build_checks import check_compiler, check_torch
from freezer.checks.findings import Check, CheckRequest, Finding
from freezer.checks.limit_checks import (
    check_clock_source,
    check_cpus,
    check_memory,
    check_temporary,
)
from freezer.checks.machine_checks import (
    check_classes,
    check_environment_here,
    check_gpu,
    check_neighbours,
    check_threads,
)
from freezer.checks.store_checks import check_store
from freezer.errors import first_line

CHECKS: Mapping[str, Check] = {
    "device classes": check_classes,
    "environment": check_environment_here,
    "CPUs": check_cpus,
    "memory": check_memory,
    "temporary folder": check_temporary,
    "clock source": check_clock_source,
    "compiler": check_compiler,
}
"""Checks without torch, by what they check."""

TORCH_CHECKS: Mapping[str, Check] = {
    "GPU": check_gpu,
    "threads": check_threads,
    "neighbours": check_neighbours,
}
"""Checks that need torch."""

GROUP = "coldpress.checks"
"""Entry points of further checks. The wheel names them too, but contains no code for them."""

_LOG = logging.getLogger("coldpress")


def run_checks(request: CheckRequest) -> Iterator[Finding]:
    """Run all checks, and log the name of each before it runs."""
    found = list(_run({"torch": check_torch}, request))
    yield from found
    further, missing = _further()
    request = replace(request, campaigns=bool(further))
    yield from _run(CHECKS, request)
    if not any(finding.level == "error" for finding in found):
        yield from _run(TORCH_CHECKS, request)
    yield from missing
    yield from _run({**further, "store": check_store}, request)


def _run(checks: Mapping[str, Check], request: CheckRequest) -> Iterator[Finding]:
    for name, check in checks.items():
        _LOG.info("checking: %s", name)
        yield from check(request)


def _further() -> tuple[dict[str, Check], list[Finding]]:
    """The checks of a checkout by name, and findings on those that cannot be imported."""
    found: dict[str, Check] = {}
    missing = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name, reverse=True):
        _LOG.info("importing %s", entry.name)
        try:
            found[entry.name] = entry.load()
        except ModuleNotFoundError as error:
            if error.name == entry.module.partition(".")[0]:
                missing.append(
                    Finding(check=entry.name, text="not installed; only campaigns need it")
                )
            else:
                missing.append(_broken(entry.name, error))
        except Exception as error:
            missing.append(_broken(entry.name, error))
    return found, missing


def _broken(name: str, error: Exception) -> Finding:
    return Finding(
        check=name,
        level="error",
        text=f"cannot be imported: {type(error).__name__}: {first_line(error)}; campaigns need it",
        remedy="python -m pip install --group pipeline   # in the checkout",
    )
