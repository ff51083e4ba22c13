"""Metrics as Prometheus scrapes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.raylets import LOOPBACK

Scrape = Sequence[Sample]


def scraped(port: int) -> Scrape:
    """The samples that a server of this machine returns."""
    with urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def summed(scrape: Scrape, name: str, label: str = "campaign") -> dict[str, float]:
    """The values of a metric above 0, by one of its labels."""
    found = Counter[str]()
    for sample in scrape:
        if sample.name == name:
            found[sample.labels[label]] += sample.value  # type: ignore[assignment]
    return {value: number for value, number in found.items() if number}
