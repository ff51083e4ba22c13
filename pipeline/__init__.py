"""Orchestration of a fleet: plan, build, judge, publish, report.

    import pipeline

    entry = pipeline.Entry(name="digits", source="transformers:./digits")
    report = pipeline.run(pipeline.Config(catalog=[entry], store="./store"))
    print(report.exit_code, [outcome.verdict for outcome in report.outcomes])

Read run.py first. Deployments never install this.
"""

from __future__ import annotations

import pkgutil
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.catalog import CatalogEntry as Entry
    from pipeline.config import Config
    from pipeline.reporting import CampaignReport
    from pipeline.run import run

__all__ = ["CampaignReport", "Config", "Entry", "run"]

_LAZY = {
    "CampaignReport": "pipeline.reporting:CampaignReport",
    "Config": "pipeline.config:Config",
    "Entry": "pipeline.catalog:CatalogEntry",
    "run": "pipeline.run:run",
}
"""Module and name of each public name. They are imported when they are first used."""


class _Package(ModuleType):
    """`pipeline.run` is the function, also after the import of the module of that name."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "run" and isinstance(value, ModuleType):
            value = vars(value)[name]
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    return pkgutil.resolve_name(_LAZY[name])


def __dir__() -> list[str]:
    return __all__
