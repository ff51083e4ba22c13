"""The command `coldpress`, with one module per group of commands, and what commands share.

May import: all of freezer. Importing it imports neither torch nor freezer.freezing.
Read first: app.py.
"""

from freezer.cli.app import main
from freezer.cli.arguments import (
    ClassOption,
    JsonOption,
    KeysOption,
    MinVersionOption,
    ModelArgument,
    NoiseOption,
    StoreOption,
    ThreadsOption,
    answer_signals,
    command_app,
    console,
    exiting,
    note,
    say,
    say_error,
    say_json,
    table,
)

__all__ = [
    "ClassOption",
    "JsonOption",
    "KeysOption",
    "MinVersionOption",
    "ModelArgument",
    "NoiseOption",
    "StoreOption",
    "ThreadsOption",
    "answer_signals",
    "command_app",
    "console",
    "exiting",
    "main",
    "note",
    "say",
    "say_error",
    "say_json",
    "table",
]
