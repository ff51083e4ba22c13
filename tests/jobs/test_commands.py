"""Campaign commands as commands of `coldpress`, and the exit codes of errors."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from freezer.cli import exiting
from freezer.cli.app import CAMPAIGN_COMMANDS
from freezer.errors import (
    INFRASTRUCTURE,
    CatalogError,
    ColdpressError,
    InfrastructureError,
    IntegrityError,
    StoreUnreachableError,
    UsageError,
)
from tests.support.steps import python

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
POINTS = [
    EntryPoint(name, module, CAMPAIGN_COMMANDS)
    for name, module in PROJECT["entry-points"][CAMPAIGN_COMMANDS].items()
]


HELP = """
import sys
from importlib.metadata import EntryPoint
from typer.testing import CliRunner
import freezer.cli.app as cli
cli.entry_points = lambda group: [EntryPoint(*words.split(), group) for words in sys.argv[1:]]
names = [words.split()[0] for words in sys.argv[1:]]
for arguments in (["--help"], *([name, "--help"] for name in (*names, "freeze", "list"))):
    done = CliRunner().invoke(cli.app, arguments)
    assert (done.exit_code, " ".join(arguments[:-1]) in done.output) == (0, True), done.output
assert set(names) <= set(CliRunner().invoke(cli.app, ["--help"]).output.split())
print(sorted({"torch", "ray", "mlflow", "numpy", "pyarrow"} & set(sys.modules)))
"""


def test_help_imports_nothing_heavy() -> None:
    """Help answers within a second."""
    words = [f"{point.name} {point.value}" for point in POINTS]
    assert python(HELP, *words).splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("error", "code", "of_a_campaign"),
    [
        (UsageError("no [such] option"), 2, 2),
        (CatalogError("bad", entry="a"), 2, 2),
        (InfrastructureError("Ray is gone", code="CP-RAY"), 3, 3),
        (StoreUnreachableError("no store"), 3, 3),
        (IntegrityError("damage"), 1, 3),
        (KeyboardInterrupt(), 130, 130),
    ],
)
def test_every_error_has_an_exit_code(
    error: BaseException, code: int, of_a_campaign: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def raise_it() -> None:
        raise error

    commands: list[Callable[[], None]] = [
        exiting(interrupted="interrupted")(raise_it),
        exiting(refused=INFRASTRUCTURE, interrupted="interrupted")(raise_it),
    ]
    for command, expected in zip(commands, (code, of_a_campaign), strict=True):
        with pytest.raises(SystemExit) as caught:
            command()
        assert caught.value.code == expected
        line = error.coded if isinstance(error, ColdpressError) else "interrupted"
        assert capsys.readouterr().err == f"{line}\n"
