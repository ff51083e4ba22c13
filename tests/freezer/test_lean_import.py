"""Imports: reading needs no torch, serving nothing of freezer.freezing, and nothing needs ray,
mlflow or pydantic.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from freezer.store import Store
from tests.conftest import Frozen
from tests.support.steps import python

MAIN = "import sys; from freezer.cli import main; sys.argv = ['coldpress', *sys.argv[1:]]; main()"

SHOW = """
import sys
{}
print(sorted({{"torch", "numpy", "pyarrow", "ray", "mlflow", "pydantic"}} & set(sys.modules)))
"""


def imported_by(code: str, *args: object) -> str:
    return python(SHOW.format(code), *args).splitlines()[-1]


def test_import_freezer_is_light() -> None:
    assert (
        imported_by(
            "import freezer; assert dir(freezer) == freezer.__all__;"
            " freezer.DeviceClass, freezer.Dim, freezer.IncompatibleError"
        )
        == "[]"
    )


ROOT = Path(__file__).parents[2]

READING = (
    "errors.py",
    "limits.py",
    "files",
    "spec",
    "hardware",
    "artifact",
    "store",
    "cli",
    "freezing/recipes.py",
)
"""Modules that do not import torch."""


def module_names(place: str) -> list[str]:
    """Modules in a file or folder of freezer."""
    path = ROOT / "freezer" / place
    files = (
        [path]
        if path.is_file()
        else [file for file in path.rglob("*.py") if file.name != "__main__.py"]
    )
    return sorted(
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in files
    )


def test_reading_modules_import_no_torch() -> None:
    modules = [name for place in READING for name in module_names(place)]
    assert (
        imported_by(
            "import importlib\nfor name in sys.argv[1:]: importlib.import_module(name)", *modules
        )
        == "[]"
    )


OWN = """
import atexit, sys
def imported():
    return sorted(name for name in sys.modules if name.startswith("freezer.freezing"))
atexit.register(lambda: print(imported()))
"""
"""Prints the modules of freezer.freezing that a process has imported."""


def test_serving_imports_nothing_of_freezing(scripted: Frozen) -> None:
    code = """
import freezer, torch
freezer.load(sys.argv[1])
freezer.verify(sys.argv[1])
compilers = [name for name in sys.modules if name.startswith("torch._inductor.compile")]
print(torch.cuda.is_initialized(), compilers, {"ray", "mlflow", "pydantic"} & set(sys.modules))
"""
    assert python(OWN + code, scripted.artifact.folder).splitlines() == ["False [] set()", "[]"]


@pytest.mark.parametrize("command", ["pull", "run"])
def test_commands_import_no_more_than_they_need(
    command: str, published: Store, tmp_path: Path
) -> None:
    given, pulled = tmp_path / "x.safetensors", tmp_path / "pulled"
    arguments: list[object] = ["mlp", "--store", published.root, "--dest", pulled]
    unused = ["pyarrow", "ray", "mlflow", "torch", "numpy"]
    if command == "run":
        save_file({"x": torch.ones(2, 4)}, given)
        published.pull(published.version("mlp"), "portable", pulled)
        arguments = [pulled, "--input", given, "--output", tmp_path / "y.safetensors"]
        unused = unused[:3]
    blocked = f"import sys; sys.modules.update(dict.fromkeys({unused!r})); "
    assert python(OWN + blocked + MAIN, command, *arguments).splitlines()[-1] == "[]"


def test_freezing_works_with_minimal_dependencies(tmp_path: Path) -> None:
    blocked = ("pyarrow", "rich", "typer", "ray", "mlflow", "pydantic", "pandas", "psutil", "yaml")
    code = f"""
import sys, warnings
sys.modules.update(dict.fromkeys({blocked!r}))
import torch, freezer
from freezer.spec.limits import Limits, SamplingPolicy
from tests.support.models import mlp
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
paths = [item.path for item in result.artifact.manifest.files]
print(sorted(path for path in paths if "latency" in path or "drift" in path))
"""
    imported, evidence = python(code, tmp_path / "out").splitlines()[-2:]
    assert imported == "[]"
    assert evidence == "['evidence/drift.json', 'evidence/latency.json']"
