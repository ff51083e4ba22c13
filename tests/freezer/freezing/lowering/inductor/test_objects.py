"""Objects of the C++ compiler are shared by models of one architecture, and by nothing else."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.cpp_builder import CppBuilder, CppOptions, get_compiler_version_info

from freezer.freezing.candidates import Candidate, build
from freezer.freezing.candidates.candidate import EVIDENCE
from freezer.freezing.capture import Attempt
from freezer.freezing.lowering import objects_kept_in
from freezer.freezing.lowering.inductor.objects import reused_objects
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import target_here
from tests.support.commands import output
from tests.support.steps import HERE, random_inputs, subject_of

X = random_inputs(2, 3, 8, 8)

IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
from tests.freezer.freezing.lowering.inductor.test_objects import build_after_another
build_after_another(Path(sys.argv[1]), Path(sys.argv[2]))
"""


class Network(nn.Module):
    """Convolutions whose weights are packed, one of them in groups and one for a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
        self.short = nn.Conv2d(16, 32, 1, stride=2)
        self.last = nn.Conv2d(32, 32, 3, padding=1, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        short = self.short(self.first(x))
        answer: torch.Tensor = torch.relu(short + self.last(short))
        return answer


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Network().eval()


def build_one(
    seed: int, folder: Path, objects: Path, recipes: tuple[str, ...] = ("inductor-frozen",)
) -> Candidate:
    """Build by recipes that share captures; return the last candidate."""
    subject, attempts = subject_of(network(seed), {"x": X}), dict[str, Attempt]()
    for recipe in recipes:
        (folder / recipe).mkdir(parents=True)
        with objects_kept_in(objects):
            candidate = build(
                subject,
                RECIPES[recipe],
                target_here(HERE, 2),
                folder / recipe,
                attempts=attempts,
            )
    return candidate


def build_after_another(folder: Path, objects: Path) -> None:
    """Build after another recipe, on another stack: whatever is left there gets into no source."""
    recipes = ("torchscript-frozen", "inductor-frozen")
    thread = threading.Thread(target=build_one, args=(0, folder, objects, recipes))
    thread.start()
    thread.join()


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a compiler that writes a line for each object; return the file."""
    folder.mkdir(exist_ok=True)
    log, script = folder / "log", folder / "g++"
    log.touch()
    counted = "*wrapper.cpp*|*kernel.cpp*"
    script.write_text(f'#!/bin/sh\ncase "$*" in {counted}) echo >> {log} ;; esac\nexec g++ "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


def test_retrained_model_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sources are those that another process made, byte by byte."""
    log, objects = compiler(tmp_path / "first", monkeypatch), tmp_path / "objects"
    output(sys.executable, "-c", IN_ANOTHER_PROCESS, tmp_path / "a", objects)
    num_compiled = len(log.read_text())
    assert num_compiled == len(list(objects.iterdir())) > 0
    candidate = build_one(1, tmp_path / "b", objects)
    file = Path("inductor-frozen", EVIDENCE, "all-code.txt")
    assert (tmp_path / "b" / file).read_bytes() == (tmp_path / "a" / file).read_bytes()
    assert len(log.read_text()) == num_compiled
    subject = subject_of(network(1), {"x": X})
    torch.testing.assert_close(candidate.open(subject)(x=X), network(1)(X), atol=1e-5, rtol=1e-4)


def compile_file(folder: Path) -> bytes:
    """Compile a file as Inductor does, with objects shared in a folder; return its object."""
    source = folder / "cache" / "kernel.cpp"
    source.parent.mkdir(exist_ok=True)
    source.write_text("int answer() { return 42; }")
    options = CppOptions(compile_only=True, compiler=str(folder / "g++"))
    builder = CppBuilder("kernel", str(source), options, str(source.parent))
    with objects_kept_in(folder / "objects"), reused_objects(source.parent):
        builder.build()
    return Path(builder.get_target_file_path()).read_bytes()


@pytest.mark.parametrize("damage", ["truncated", "changed", "poisoned", "another", "other headers"])
def test_damaged_and_foreign_objects_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """Also of a compiler at the same path, whose only difference is what it says of itself."""
    log = compiler(tmp_path, monkeypatch)
    content = compile_file(tmp_path)
    assert compile_file(tmp_path) == content
    assert len(log.read_text()) == 1
    [stored] = (tmp_path / "objects").iterdir()
    kept = stored.read_bytes()
    if damage == "truncated":
        stored.write_bytes(kept[:-1])
    elif damage == "changed":
        stored.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    elif damage == "poisoned":
        stored.write_bytes(b"\x7fELF" + kept)
    elif damage == "another":
        script = tmp_path / "g++"
        script.write_text(script.read_text().replace("case", 'echo "gcc version 99" >&2; case', 1))
        get_compiler_version_info.cache_clear()  # as in another process
    else:
        monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.0"))
    assert compile_file(tmp_path) == content
    assert len(log.read_text()) == 2
    assert stored.read_bytes() == kept
