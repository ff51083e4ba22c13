"""Costs: what a million inferences cost on each device class that has a price, and the cheapest
class.

One call follows another on a machine that does nothing else, so a call costs its median time at the
machine's price. Prices are
not part of any key: with other prices a campaign reports other costs, and repeats nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from freezer.artifact import num_items
from pipeline.planning import Item
from pipeline.records import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassCost:
    """Cost of one model on one device class.

    Attributes:
        cost_per_million: of as many inferences, in the currency of the prices.
        meets_limits: whether what serves there keeps the entry's limits.
        cheapest: of the model's classes that do.
    """

    model: str
    device_class: str
    cost_per_million: float
    meets_limits: bool
    cheapest: bool = False


def class_costs(items: Iterable[Item], outcomes: Sequence[Outcome]) -> tuple[ClassCost, ...]:
    """Return the costs of all outcomes that have a price and something that serves, in order."""
    planned = {(item.entry.name, item.device_class): item for item in items}
    costs: list[ClassCost] = []
    least: dict[str, float] = {}
    for outcome in outcomes:
        item = planned.get((outcome.model, outcome.device_class))
        cost = _cost(item, outcome) if item else None
        if cost is None:
            continue
        costs.append(cost)
        if cost.meets_limits:
            lowest = least.get(cost.model, cost.cost_per_million)
            least[cost.model] = min(cost.cost_per_million, lowest)
    marked = []
    for cost in costs:
        is_least = cost.cost_per_million == least.get(cost.model)
        marked.append(replace(cost, cheapest=cost.meets_limits and is_least))
    return tuple(marked)


def _cost(item: Item, outcome: Outcome) -> ClassCost | None:
    """The cost of what serves after an outcome; None if it has no price or was not timed."""
    price = item.entry.price_per_hour.get(outcome.device_class)
    served_ms = _served_ms(outcome)
    if price is None or served_ms is None:
        return None
    points = outcome.report.points if outcome.report else ()
    num_per_call = num_items(points[0].point if points else {})
    calls_per_hour = 3.6e6 / served_ms
    return ClassCost(
        model=outcome.model,
        device_class=outcome.device_class,
        cost_per_million=price / calls_per_hour * 1e6 / num_per_call,
        meets_limits=outcome.verdict != "kept-eager" or _eager_meets_limits(item, served_ms),
    )


def _served_ms(outcome: Outcome) -> float | None:
    """Median latency of what serves; with `kept-eager` that of eager, which the captured program
    equals about.
    """
    latency_ms, previous = outcome.figures.latency_ms, outcome.previous
    served = {
        "published": latency_ms.p50,
        "kept-eager": latency_ms.eager_p50,
        "kept-previous": previous.p50_ms if previous else None,
    }
    return served.get(outcome.verdict)


def _eager_meets_limits(item: Item, eager_ms: float) -> bool:
    """Whether eager keeps the limits besides `speedup_min`; not if one is about what is not
    measured of it.
    """
    limits = item.entry.limits
    if limits.size_mb_max is not None or limits.memory_mb_max is not None:
        return False
    return limits.latency_ms_max is None or (
        item.entry.objective != "p95" and eager_ms <= limits.latency_ms_max
    )
