"""Keys are equal for equal work, and known without loading a model."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from freezer.freezing.recipes import RECIPES, Recipe
from freezer.freezing.sources import parse_source
from freezer.spec import Dim, InputSpec, Limits, SamplingPolicy, TensorSpec
from pipeline.catalog import Entry
from pipeline.planning import FileDigests, source_key
from pipeline.planning.keys import BuildTarget, Key, build_key, judge_key, make_key
from tests.support import campaigns

POLICY = SamplingPolicy()
TOOLCHAIN = {"torch": "2.13.0", "cxx": "g++ 12"}


def make_entry(folder: Path, source: str = "python:mod:make", **settings: object) -> Entry:
    made = campaigns.entry("m", folder)
    return replace(
        made, source=parse_source(source, folder=folder, search_path=(str(folder),), **settings)
    )


def source_digest(entry: Entry, folder: Path) -> str:
    return source_key(entry, FileDigests(folder / "digests.json")).digest


TARGET = BuildTarget(device_class="cpu-x86-64-v4", threads=(2,), toolchain=TOOLCHAIN, samples=None)


def key_of_build(
    entry: Entry, folder: Path, recipe: Recipe = RECIPES["inductor-frozen"], **changed: Any
) -> Key:
    source = source_key(entry, FileDigests(folder / "digests.json"))
    return build_key(entry, source, recipe, replace(TARGET, **changed))


def test_source_key_depends_on_code_arguments_and_files(tmp_path: Path) -> None:
    entry = make_entry(tmp_path)
    before = source_digest(entry, tmp_path)
    assert source_digest(make_entry(tmp_path), tmp_path) == before
    assert source_digest(make_entry(tmp_path, args={"hidden": 1}), tmp_path) != before
    assert source_digest(make_entry(tmp_path, seed=1), tmp_path) != before
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"1")
    with_file = source_digest(replace(entry, files=(weights,)), tmp_path)
    assert with_file != before
    weights.write_bytes(b"22")
    assert source_digest(replace(entry, files=(weights,)), tmp_path) != with_file
    (tmp_path / "mod.py").write_text("def make(): return 1\n")
    assert source_digest(entry, tmp_path) != before
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}")
    saved = make_entry(tmp_path, "transformers:bert")
    before = source_digest(saved, tmp_path)
    (tmp_path / "bert" / "config.json").write_text('{"a": 1}')
    assert source_digest(saved, tmp_path) != before


def test_build_key_depends_on_each_part(tmp_path: Path) -> None:
    entry = make_entry(tmp_path)
    changed_entries: list[dict[str, Any]] = [
        {"preserve": ("version",)},
        {"preserve": ("sub.version",)},
        {"reset": "r"},
        {"spec": None},
    ]
    changed_targets: list[dict[str, Any]] = [
        {"device_class": "cpu-x86-64-v3"},
        {"threads": (4,)},
        {"toolchain": {**TOOLCHAIN, "torch": "2.14.0"}},
        {"samples": "sha256:1"},
    ]
    keys = [
        key_of_build(entry, tmp_path),
        key_of_build(entry, tmp_path, RECIPES["torchscript-frozen"]),
        *(key_of_build(replace(entry, **changed), tmp_path) for changed in changed_entries),
        *(key_of_build(entry, tmp_path, **changed) for changed in changed_targets),
    ]
    assert len({key.digest for key in keys}) == len(keys)


def key_of_judge(entry: Entry, *, policy: SamplingPolicy = POLICY, **changed: Any) -> Key:
    target = replace(TARGET, **changed)
    return judge_key(entry, make_key({}), [make_key({"of": "a build"})], target, policy)


def test_gates_change_only_the_judge_key(tmp_path: Path) -> None:
    entry = make_entry(tmp_path)
    plain = key_of_judge(entry)
    stricter = replace(entry, limits=Limits(speedup_min=2))
    assert key_of_build(entry, tmp_path) == key_of_build(stricter, tmp_path)
    changed: list[dict[str, Any]] = [
        {"limits": stricter.limits},
        {"limits": replace(entry.limits, memory_mb_max=100)},
        {"limits": replace(entry.limits, nan="keep")},
        {"objective": "size"},
    ]
    for fields in changed:
        assert key_of_judge(replace(entry, **fields)) != plain
    assert key_of_judge(entry, policy=SamplingPolicy(time_limit_s=1)) != plain
    assert key_of_judge(entry, samples="sha256:1") != plain
    quick = replace(entry, limits=replace(entry.limits, timeout_s=5))
    assert key_of_judge(quick) == plain, "a time limit changes no verdict that is reached"


POINTS = ({"batch": 1}, {"batch": 3})
SPEC = InputSpec(
    inputs=(TensorSpec(name="input", dtype="float32", shape=("batch", 16)),),
    dims=(Dim(name="batch", min=1, max=4),),
)


def test_default_threads_and_points_are_not_in_keys(tmp_path: Path) -> None:
    plain = replace(make_entry(tmp_path), spec=SPEC)
    named = replace(plain, points=({"batch": 1},))
    build, judge = key_of_build(plain, tmp_path), key_of_judge(plain)
    assert build == key_of_build(named, tmp_path)
    assert judge == key_of_judge(named) == key_of_judge(replace(plain, points=({},)))
    of_build = "source inputs samples recipe device_class num_threads toolchain weights"
    of_judge = "builds limits policy num_threads inputs task_metric sizes"
    assert set(build.parts) == {*of_build.split(), "format_version"}
    assert set(judge.parts) == {*of_judge.split()}
    assert judge.parts["sizes"] == [{"batch": 2}, {"batch": 4}]
    one_size = replace(plain, spec=SPEC.at({"batch": 1}))
    assert "sizes" not in key_of_judge(one_size).parts, "nothing else to time"


def test_threads_and_points_change_keys(tmp_path: Path) -> None:
    plain = replace(make_entry(tmp_path), spec=SPEC)
    both = replace(plain, points=POINTS)
    assert key_of_build(both, tmp_path).parts["points"] == list(POINTS)
    for recipe in ("torchscript-frozen", "torchscript-optimized", "portable"):
        keys = [key_of_build(one, tmp_path, RECIPES[recipe]) for one in (plain, both)]
        assert keys[0] == keys[1], "it makes no copies"
    further = key_of_build(plain, tmp_path, threads=(2, 1))
    assert further == key_of_build(plain, tmp_path), "the judge builds them"
    judges = [key_of_judge(one) for one in (plain, both, replace(plain, points=POINTS[::-1]))]
    judges += [key_of_judge(one, threads=(2, 1)) for one in (plain, both)]
    assert len({key.digest for key in judges}) == 5
    unknown = key_of_judge(replace(both, spec=None))
    assert unknown.parts["points"] == list(POINTS), "its dims are known only when it is loaded"


def test_judge_key_without_builds_has_source_and_class(tmp_path: Path) -> None:
    entry = make_entry(tmp_path)
    sources = [make_key({"weights": 1}), make_key({"weights": 2})]
    targets = [TARGET, replace(TARGET, device_class="cpu-x86-64-v3")]

    def keys(*builds: Key) -> set[str]:
        return {
            judge_key(entry, source, builds, target, POLICY).digest
            for source in sources
            for target in targets
        }

    assert len(keys()) == 4
    assert len(keys(key_of_build(entry, tmp_path))) == 1, "a build's key has both"


def test_digests_are_cached_by_size_and_time(tmp_path: Path) -> None:
    cache = tmp_path / "digests.json"
    file = tmp_path / "file"
    file.write_bytes(b"one")
    digests = FileDigests(cache)
    found = digests.of(file)
    digests.save()
    stat = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert FileDigests(cache).of(file) == found, (
        "same size and time: taken from the cache, by contract"
    )
    cache.write_text("{broken")
    assert FileDigests(cache).of(file) != found
