"""A campaign with quick, tolerant sampling:

    python tests/support/drive.py CATALOG STORE TRACKING_URI CAMPAIGN JSON [CLASS ...]
    [--allow-regression]

The same call as jobs.optimize makes, for tests on machines that do other things meanwhile: figures
mean nothing here, verdicts do."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from freezer.spec import SamplingPolicy
from pipeline.config import Config
from pipeline.reporting import LineDisplay
from pipeline.run import run

ALLOW = "--allow-regression"
POLICY = SamplingPolicy(
    time_limit_s=0.5, warmup_s=0.2, min_rounds=2, busy_limit=2.0, steal_limit=2.0
)


def main(catalog: str, store: str, tracking_uri: str, campaign: str, json: str, *more: str) -> int:
    """Run the campaign; the exit code."""
    config = Config(
        catalog=catalog,
        store=store,
        tracking_uri=tracking_uri,
        campaign=campaign,
        policy=POLICY,
        device_classes=tuple(name for name in more if name != ALLOW),
        allow_regression=ALLOW in more,
    )
    report = run(config, LineDisplay(Console(width=200), verbose=True))
    report.write_json(Path(json))
    print(*report.infrastructure, sep="\n", end="", file=sys.stderr)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
