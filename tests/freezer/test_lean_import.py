"""What is imported when: reading needs no torch, serving no compiler, and nothing here needs ray, mlflow or pydantic."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from freezer.store.store import Store
from tests.conftest import Frozen
from tests.steps import python

MAIN = "import sys; from freezer.cli import main; sys.argv = ['coldpress', *sys.argv[1:]]; main()"

SHOW = """
import sys
{}
print(sorted({{"torch", "numpy", "pyarrow", "ray", "mlflow", "pydantic"}} & set(sys.modules)))
"""


def imported_by(code: str, *args: object) -> str:
    return python(SHOW.format(code), *args).splitlines()[-1]


def test_the_package_itself_imports_nothing_heavy() -> None:
    assert imported_by("import freezer; freezer.DeviceClass, freezer.Dim, freezer.IncompatibleError") == "[]"


ROOT = Path(__file__).parents[2]

READING = ("errors.py", "limits.py", "files", "spec", "hardware", "artifact", "store", "cli", "freezing/recipes")
"""Where no module imports torch."""


def module_names(place: str) -> list[str]:
    """The modules in a file or folder of freezer."""
    path = ROOT / "freezer" / place
    files = [path] if path.is_file() else [file for file in path.rglob("*.py") if file.name != "__main__.py"]
    return sorted(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files)


def test_what_only_reads_imports_no_torch() -> None:
    modules = [name for place in READING for name in module_names(place)]
    assert imported_by("import importlib\nfor name in sys.argv[1:]: importlib.import_module(name)", *modules) == "[]"


LIBRARIES = "import typer.main, rich.console, archspec.cpu"


def commands(store: Store, tmp_path: Path) -> dict[str, list[str]]:
    return {
        "classes": ["classes"],
        "inspect": ["inspect", "mlp", "--store", str(store.root)],
        "pull": ["pull", "mlp", "--store", str(store.root), "--dest", str(tmp_path / "pulled")],
    }


@pytest.mark.parametrize("command", ["classes", "inspect", "pull"])
def test_commands_that_only_read_import_no_torch_and_answer_at_once(command: str, published: Store, tmp_path: Path) -> None:
    arguments = commands(published, tmp_path)[command]
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", MAIN, *arguments], capture_output=True, text=True, check=True)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "freezer.store.store" in modules
    assert not modules & {"torch", "numpy", "pyarrow", "ray", "mlflow"}, "pydantic may be there: typer itself takes it"
    # 0.4 s where this was written. Against the libraries that any such command needs, since machines differ and are disturbed.
    environ = with_bytecode(tmp_path)
    pairs = [
        (
            cpu_seconds_of([sys.executable, "-c", MAIN, *arguments], environ),
            cpu_seconds_of([sys.executable, "-c", LIBRARIES], environ),
        )
        for _ in range(4)
    ]
    assert min(own / libraries for own, libraries in pairs) < 5, pairs


def with_bytecode(folder: Path) -> dict[str, str]:
    """An environment in which modules are compiled once, as where they are installed, whatever this one says of that."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**environ, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}


def cpu_seconds_of(command: list[str], environ: dict[str, str]) -> float:
    """What a command computes, whatever else the machine does: no wall-clock bound holds on a loaded one."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True, env=environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_loading_adds_little_to_the_import_of_torch(tmp_path: Path) -> None:
    code = """
import time
import torch
of_torch = time.process_time()
import freezer
freezer.load
print((time.process_time() - of_torch) / of_torch)
"""
    environ = with_bytecode(tmp_path)
    assert min(float(python(code, env=environ)) for _ in range(3)) < 0.15


def test_serving_and_freezing_need_neither_ray_nor_mlflow_nor_pydantic(scripted: Frozen) -> None:
    found = imported_by("import freezer, sys; freezer.load(sys.argv[1]); freezer.verify(sys.argv[1])", scripted.artifact.folder)
    assert found == "['numpy', 'torch']"
    for module in ROOT.joinpath("freezer").rglob("*.py"):
        text = module.read_text()
        assert not any(f"import {name}" in text for name in ("ray", "mlflow", "pydantic")), module


def test_serving_starts_no_compiler_and_no_cuda(scripted: Frozen) -> None:
    code = """
import sys, freezer, torch
freezer.load(sys.argv[1])
print(torch.cuda.is_initialized(), [name for name in sys.modules if name.startswith("torch._inductor.compile")])
"""
    assert python(code, scripted.artifact.folder).strip() == "False []"


def test_public_names_exist_and_nothing_else_does() -> None:
    code = """
import freezer
assert all(callable(getattr(freezer, name)) for name in ("freeze", "load", "verify"))
for name in freezer.__all__:
    assert getattr(freezer, name) is not None, name
try:
    freezer.none
except AttributeError as error:
    print(error)
"""
    assert python(code).strip() == "module 'freezer' has no attribute 'none'"


OWN = """
import atexit, sys
atexit.register(lambda: print(sorted(name for name in sys.modules if name.startswith("freezer.freezing"))))
"""
"""Prints the modules of the build side that a process has imported."""


def test_loading_imports_nothing_of_the_build_side(scripted: Frozen) -> None:
    code = "import freezer\nmodel = freezer.load(sys.argv[1])\nfreezer.verify(sys.argv[1])"
    assert python(OWN + code, scripted.artifact.folder).splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["pull", "verify", "inspect", "run"])
def test_serving_commands_import_nothing_of_the_build_side(command: str, published: Store, tmp_path: Path) -> None:
    save_file({"x": torch.ones(2, 4)}, tmp_path / "x.safetensors")
    pulled = published.pull(published.version("mlp"), "portable", tmp_path / "portable").folder
    store = ["--store", published.root]
    arguments: list[object] = {
        "pull": ["mlp", *store, "--dest", tmp_path / "pulled"],
        "verify": ["mlp", *store],
        "inspect": ["mlp", *store],
        "run": [pulled, "--input", tmp_path / "x.safetensors", "--output", tmp_path / "y.safetensors"],
    }[command]
    shown = python(OWN + MAIN, command, *arguments)
    assert shown.splitlines()[-1] == "[]"


def test_a_freeze_needs_torch_safetensors_and_archspec_alone(tmp_path: Path) -> None:
    blocked = ("numpy", "pyarrow", "pynvml", "rich", "typer", "ray", "mlflow", "pydantic", "pandas", "psutil", "yaml")
    code = f"""
import sys, warnings
sys.modules.update(dict.fromkeys({blocked!r}))
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch, freezer
from freezer.limits import Limits, SamplingPolicy
from tests.models import mlp
model, x = mlp(), torch.ones(2, 4)
quick = dict(time_limit_s=0.3, warmup_s=0.1, min_rounds=1, busy_limit=2.0, steal_limit=2.0)
options = freezer.FreezeOptions(
    recipes=["torchscript-frozen"], limits=Limits(speedup_min=0.0), policy=SamplingPolicy(**quick)
)
result = freezer.freeze(model, {{"x": x}}, out=sys.argv[1], options=options)
assert result.verdict == "published", result.reason
torch.testing.assert_close(freezer.load(sys.argv[1])(x=x), model(x))
freezer.verify(sys.argv[1])
print([name for name in {blocked!r} if sys.modules.get(name)])
print(sorted(item.path for item in result.artifact.manifest.files if "latency" in item.path or "drift" in item.path))
"""
    told, evidence = python(code, tmp_path / "out").splitlines()[-2:]
    assert told == "[]"
    assert evidence == "['evidence/drift.json', 'evidence/latency.json']", "pyarrow is not there, and nothing is lost"


def test_numpy_is_not_needed_to_read(published: Store) -> None:
    blocked = "import sys; sys.modules['numpy'] = sys.modules['torch'] = sys.modules['pyarrow'] = None; " + MAIN
    env = {**os.environ, "COLUMNS": "200"}
    assert "mlp, version 1" in python(blocked, "inspect", "mlp", "--store", published.root, env=env)
