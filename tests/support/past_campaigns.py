"""Campaigns as a ledger has them after their end, written without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from freezer.artifact import MeasuredDrift, MeasuredLatency
from freezer.freezing.recipes import EAGER
from freezer.hardware import PORTABLE
from freezer.store import Store
from pipeline.ledger import CampaignRecord, Draft, Ledger, members_of
from pipeline.records import ClassFacts, Failure, Outcome, OutputDrift
from tests.support import outcomes
from tests.support.outcomes import candidate, outcome

CLASSES = ("cpu-x86-64-v4", "cpu-x86-64-v3", PORTABLE)


def published(
    model: str,
    device_class: str = CLASSES[0],
    *,
    speedup: float = 1.8,
    error_ratio: float = 1.2,
    key: str = "1",
    eager_ms: float = 20.0,
) -> Outcome:
    """An outcome with two candidates and figures for all that a report shows."""
    drift = MeasuredDrift(
        error_ratio=error_ratio, max_abs_err=1e-6, sqnr_db=120.0, margin=3.0 / error_ratio
    )
    latency = MeasuredLatency(
        eager_p50=eager_ms, p50=20.0 / speedup, p90=21.0 / speedup, p99=22.0 / speedup
    )
    figures: dict[str, Any] = {"drift": drift, "latency_ms": latency}
    own = {**figures, "speedup": speedup, "speedup_ci": (speedup * 0.98, speedup * 1.02)}
    output = OutputDrift(
        output="logits",
        kind="random",
        set_index=0,
        error_ratio=error_ratio,
        max_abs_err=1e-6,
        sqnr_db=120.0,
    )
    recipe = "inductor-frozen"
    return outcome(
        model,
        device_class=device_class,
        reason=f"{recipe} is {speedup:.2f} times as fast as eager",
        judge_key=f"{key}-{model}-{device_class}",
        recipe=recipe,
        candidates=(
            candidate(recipe, outputs=(output,), **own),
            candidate("torchscript-frozen", speedup=1.1, speedup_ci=(1.08, 1.12), **figures),
        ),
        artifact=f"sha256:{key}{model}{device_class}",
        version=int(key),
        host={"cpu": "Test CPU", "torch": "2.13.0+cpu", "coldpress": "0.1.0"},
        deciles_ms={
            name: tuple(first + place / 5 for place in range(11))
            for name, first in ((EAGER, 19), (recipe, 10))
        },
        **own,
    )


def failed(model: str, device_class: str = CLASSES[0], *, key: str = "1") -> Outcome:
    """An outcome of a model that cannot be captured."""
    return outcomes.failed(
        model,
        device_class=device_class,
        reason="the model branches on the values of a tensor; <b>use torch.cond</b>",
        failure=Failure(
            kind="capture",
            code="CP-CAPTURE",
            message="the model branches",
            log_tail="line 12: if x.sum() > 0:",
        ),
        judge_key=f"{key}-{model}-{device_class}",
    )


def kept_eager(model: str, device_class: str = CLASSES[0], *, key: str = "1") -> Outcome:
    """An outcome of a model that no recipe makes faster."""
    found = published(model, device_class, speedup=0.97, key=key)
    return replace(found, verdict="kept-eager", reason="no candidate is faster than eager")


def write_campaign(
    store: Store,
    name: str,
    reached: Sequence[Outcome],
    *,
    started: float = 1_790_000_000.0,
    interrupted: bool = False,
) -> None:
    """Append the outcomes and the record of a campaign that has ended to the store's ledger."""
    with Ledger(store, name) as ledger:
        ledger.append_all(
            [
                Draft(
                    kind="outcome",
                    key=one.judge_key,
                    model=one.model,
                    device_class=one.device_class,
                    data={"outcome": one.to_json()},
                )
                for one in reached
            ]
        )
        record = CampaignRecord(
            catalog="catalog.yaml",
            started=started,
            finished=started + 600,
            exit_code=int(any(one.failed for one in reached)),
            members=members_of(reached),
            facts={CLASSES[0]: ClassFacts(num_threads=2, toolchain={"torch": "2.13.0"})},
        )
        record = replace(record, interrupted=interrupted)
        for kind in ("campaign", "pass") if record.is_pass else ("campaign",):
            ledger.append(kind, name, model="", device_class="", data=record.to_json())
