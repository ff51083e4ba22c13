"""Plans with consent to lower precision: which classes get which recipes, and what keys depend
on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from freezer.freezing.recipes import RECIPES
from freezer.hardware import auto_classes, describe_host
from freezer.serving.compatibility import rungs
from freezer.spec import FLOAT32, Accuracy
from freezer.store import Store
from pipeline.catalog import Entry
from pipeline.ledger import Ledger
from pipeline.planning import Item, Plan
from pipeline.planning.plan import auto_classes_of
from pipeline.records import ClassFacts
from tests.support.campaigns import entry, plan_of
from tests.support.classifiers import write_samples
from tests.support.hosts import CASCADE_LAKE, SAPPHIRE_RAPIDS, SKYLAKE_SERVER

V4, FINE = "cpu-x86-64-v4", "cpu-sapphirerapids"
TOOLS = ("openvino", "onnxruntime", "onnx", "onnxscript", "nncf", "torchao")
FACTS = ClassFacts(num_threads=2, toolchain={"torch": "2.13.0", **dict.fromkeys(TOOLS, "3.4")})


def consenting(folder: Path, **changes: object) -> Entry:
    accuracy = Accuracy(samples=write_samples(folder / "a.safetensors", 80), cosine_min=0.9)
    plain = replace(entry("good", folder), recipes=("auto",), device_classes=("auto",))
    return replace(plain, precision=("int8",), accuracy=accuracy, **changes)  # type: ignore[arg-type]


def planned(folder: Path, *entries: Entry) -> Plan:
    store = Store.open(str(folder / "store"), create=True)
    with Ledger(store, "c") as ledger:
        return plan_of(
            entries,
            store,
            ledger,
            facts=FACTS,
            classes=(FINE, V4, "portable"),
        )


def precisions(item: Item) -> set[str]:
    return {RECIPES[name].precision for name in item.builds}


def test_only_classes_with_the_hardware_get_it(tmp_path: Path) -> None:
    other = replace(entry("other", tmp_path), device_classes=("auto",))
    plan = planned(tmp_path, consenting(tmp_path), other)
    assert {(item.entry.name, item.device_class): precisions(item) for item in plan.items} == {
        ("good", V4): {FLOAT32},
        ("good", FINE): {FLOAT32, "int8"},
        ("good", "portable"): {FLOAT32},
        ("other", V4): {FLOAT32},
        ("other", "portable"): {FLOAT32},
    }


def test_all_classes_are_sent_the_same_entry(tmp_path: Path) -> None:
    """Workers get the files of an entry once, whichever class starts first."""
    plan = planned(tmp_path, consenting(tmp_path))
    assert len({item.entry.accuracy for item in plan.items}) == 1
    judges = {item.device_class: item.judge.parts for item in plan.items}
    assert [name for name, parts in judges.items() if "accuracy" in parts] == [FINE]


def test_keys_depend_on_samples_and_budget(tmp_path: Path) -> None:
    def keys(changed: Entry) -> dict[str, str]:
        (item,) = (each for each in planned(tmp_path, changed).items if each.device_class == FINE)
        builds = {name: key.digest for name, key in item.builds.items()}
        return {**builds, "judge": item.judge.digest}

    plain = consenting(tmp_path)
    first = keys(plain)
    assert plain.accuracy is not None
    stricter = keys(replace(plain, accuracy=replace(plain.accuracy, cosine_min=0.99)))
    changed = {name for name, key in first.items() if stricter[name] != key}
    write_samples(tmp_path / "a.safetensors", 80, scale=2.0)
    other = keys(plain)
    lower = {name for name in first if name != "judge" and RECIPES[name].precision != FLOAT32}
    assert (
        changed == {name for name, key in first.items() if other[name] != key} == {*lower, "judge"}
    )


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (SAPPHIRE_RAPIDS, (V4, FINE, "portable")),
        (CASCADE_LAKE, (V4, "cpu-cascadelake", "portable")),
        (SKYLAKE_SERVER, (V4, "portable")),
    ],
)
def test_auto_adds_the_class_that_gains(host: object, expected: tuple[str, ...]) -> None:
    classes = describe_host(host, {}).classes  # type: ignore[arg-type]
    assert auto_classes(classes, precise=True) == expected
    assert auto_classes(sorted(classes, reverse=True), precise=True) == expected  # as labels are
    assert auto_classes(classes) == (V4, "portable")
    assert auto_classes_of([classes], precise=True) == list(expected)


def test_machines_without_it_serve_float32() -> None:
    published = (FINE, V4, "portable")
    assert rungs(published, describe_host(SKYLAKE_SERVER, {})) == [V4, "portable"]
    assert rungs(published, describe_host(SAPPHIRE_RAPIDS, {}))[0] == FINE
    limited = describe_host(SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"})
    assert rungs(published, limited) == [V4, "portable"]
