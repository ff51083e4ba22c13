"""Keys: equal for equal work, other for other work, and known without loading a model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from freezer.errors import MissingDependencyError
from freezer.freezing.models.sources import parse_source
from freezer.freezing.recipes.recipes import RECIPES, Recipe
from freezer.limits import Limits, SamplingPolicy
from freezer.spec.inputs import Dim, InputSpec
from freezer.spec.items import TensorSpec
from pipeline.catalog.entry import Entry
from pipeline.planning.file_digests import FileDigests
from pipeline.planning.keys import BuildTarget, Key, build_key, differing, judge_key, make_key, source_key
from pipeline.workspace.staging import remove_abandoned

POLICY = SamplingPolicy()
TOOLCHAIN = {"torch": "2.13.0", "cxx": "g++ 12"}


def make_entry(folder: Path, source: str = "python:mod:make", **settings: object) -> Entry:
    (folder / "mod.py").write_text("def make(): ...\n")
    return Entry(
        name="m",
        source=parse_source(source, folder=folder, search_path=(str(folder),), **settings),
        spec=InputSpec(inputs=(TensorSpec(name="x", dtype="float32", shape=("n", 4)),), dims=(Dim(name="n", min=1, max=2),)),
        samples=None,
        task_metric=None,
        limits=Limits(),
        device_classes=("auto",),
        recipes=("auto",),
        files=(),
        search_path=(str(folder),),
    )


def source_digest(entry: Entry, folder: Path) -> str:
    return source_key(entry, FileDigests(folder / "digests.json")).digest


TARGET = BuildTarget(device_class="cpu-x86-64-v4", num_threads=2, toolchain=TOOLCHAIN, samples=None)


def key_of_build(entry: Entry, folder: Path, recipe: Recipe = RECIPES["inductor-frozen"], **changed: Any) -> Key:
    source = source_key(entry, FileDigests(folder / "digests.json"))
    return build_key(entry, source, recipe, replace(TARGET, **changed))


def test_a_build_key_changes_with_what_is_preserved(tmp_path: Path) -> None:
    entry = make_entry(tmp_path)
    found = {
        key_of_build(one, tmp_path).digest
        for one in (
            entry,
            replace(entry, preserve=("version",)),
            replace(entry, preserve=("sub.version",)),
            replace(entry, reset="reset"),
            replace(entry, spec=None),
        )
    }
    assert len(found) == 5


def test_a_source_key_changes_with_all_that_settles_the_source(tmp_path: Path) -> None:
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


def test_a_transformers_folder_is_known_by_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    entry = make_entry(tmp_path, "transformers:bert")
    before = source_digest(entry, tmp_path)
    (folder / "config.json").write_text('{"a": 1}')
    assert source_digest(entry, tmp_path) != before


@pytest.mark.parametrize(
    "changed",
    [
        {"device_class": "cpu-x86-64-v3"},
        {"num_threads": 4},
        {"toolchain": {**TOOLCHAIN, "torch": "2.14.0"}},
        {"samples": "sha256:1"},
        {"recipe": "torchscript-frozen"},
    ],
)
def test_a_build_key_changes_with_each_part(tmp_path: Path, changed: dict[str, object]) -> None:
    entry = make_entry(tmp_path)
    recipe = RECIPES[str(changed.pop("recipe", "inductor-frozen"))]
    assert key_of_build(entry, tmp_path, recipe, **changed).digest != key_of_build(entry, tmp_path).digest


FROZEN = RECIPES["inductor-frozen"]
INDUCTOR = FROZEN.settings["inductor"]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (
            {"settings": {**FROZEN.settings, "inductor": {**INDUCTOR, "cpp.gemm_max_k_slices": 2}}},
            "settings.inductor.cpp.gemm_max_k_slices",
        ),
        ({"settings": {**FROZEN.settings, "weights_beside_above_mb": 64}}, "settings.weights_beside_above_mb"),
        ({"ways": FROZEN.ways[:1]}, "ways"),
        ({"ways": FROZEN.ways[::-1]}, "ways"),
    ],
)
def test_a_build_key_changes_with_one_setting_of_its_recipe_alone(tmp_path: Path, changed: dict[str, Any], name: str) -> None:
    entry = make_entry(tmp_path)
    before, after = (key_of_build(entry, tmp_path, recipe) for recipe in (FROZEN, replace(FROZEN, **changed)))
    assert before.digest != after.digest
    assert differing(before.parts, after.parts) == [f"recipe.{name}"]


def test_plain_torchscript_needs_no_build_for_each_thread_count(tmp_path: Path) -> None:
    entry = make_entry(tmp_path)
    one, four = (key_of_build(entry, tmp_path, RECIPES["torchscript-frozen"], num_threads=n) for n in (1, 4))
    assert one == four


def test_gates_are_part_of_a_judge_and_not_of_a_build(tmp_path: Path) -> None:
    entry = make_entry(tmp_path)
    stricter = replace(entry, limits=Limits(speedup_min=2))
    assert key_of_build(entry, tmp_path) == key_of_build(stricter, tmp_path)
    builds = [key_of_build(entry, tmp_path)]

    def judged(limits: Limits = entry.limits, policy: SamplingPolicy = POLICY, samples: str | None = None) -> str:
        target = replace(TARGET, samples=samples)
        return judge_key(replace(entry, limits=limits), make_key({}), builds, target, policy).digest

    assert judged() != judged(limits=stricter.limits)
    assert judged() != judged(policy=SamplingPolicy(time_limit_s=1))
    assert judged() != judged(samples="sha256:1")
    assert judged() == judged(limits=replace(entry.limits, timeout_s=5)), "a time limit changes no verdict that is reached"


def test_a_judge_without_builds_depends_on_source_and_class(tmp_path: Path) -> None:
    entry, sources = make_entry(tmp_path), [make_key({"weights": 1}), make_key({"weights": 2})]
    targets = [TARGET, replace(TARGET, device_class="cpu-x86-64-v3")]

    def keys(*builds: Key) -> set[str]:
        return {judge_key(entry, source, builds, target, POLICY).digest for source in sources for target in targets}

    assert len(keys()) == 4
    assert len(keys(key_of_build(entry, tmp_path))) == 1, "a build's key has both"


def test_transformers_that_are_not_installed_are_told_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    (tmp_path / "model").mkdir()
    source = parse_source("transformers:model", folder=tmp_path)
    with pytest.raises(MissingDependencyError, match=r"^source transformers:.* needs transformers; pip install"):
        source_key(replace(make_entry(tmp_path), source=source), FileDigests(tmp_path / "digests.json"))


def test_digests_are_cached_by_size_and_time_and_survive_a_broken_cache(tmp_path: Path) -> None:
    cache, file = tmp_path / "digests.json", tmp_path / "file"
    file.write_bytes(b"one")
    digests = FileDigests(cache)
    found = digests.of(file)
    digests.save()
    stat = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert FileDigests(cache).of(file) == found, "same size and time: taken from the cache, by contract"
    cache.write_text("{broken")
    assert FileDigests(cache).of(file) != found


@pytest.mark.parametrize("step", [1, 2], ids=["written", "moved"])
def test_a_cache_of_digests_that_was_being_written_by_a_killed_driver_leaves_nothing(tmp_path: Path, step: int) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from pipeline.planning.keys import FileDigests\n"
        "plain, calls = os.replace, []\n"
        "def replace(*args):\n"
        "    calls.append(args)\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if len(calls) == int(sys.argv[2]) else plain(*args)\n"
        "os.replace = replace\n"
        "digests = FileDigests(Path(sys.argv[1])); digests.remember('a', 'b'); digests.save()\n"
    )
    work = tmp_path / ".coldpress"
    cache = str(work / "digests.json")
    done = subprocess.run([sys.executable, "-c", code, cache, str(step)], cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list((work / "staging").iterdir())) == 1
    remove_abandoned(str(tmp_path))
    assert [path for path in work.rglob("*") if path.is_file()] == []


def test_explain_names_the_parts_that_differ() -> None:
    one = make_key({"a": 1, "b": {"c": 2, "d": 3}})
    other = make_key({"a": 1, "b": {"c": 2, "d": 4}, "e": 5})
    assert differing(one.parts, other.parts) == ["b.d", "e"]
    assert differing(one.parts, one.parts) == []
