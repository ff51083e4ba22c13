"""torch's settings as they would be without environment variables.

torch's configuration modules read defaults from the environment when they are imported, possibly
long before a build, and some variables override values that a program sets. The values without any
variables come from executing the modules again in an environment without them, so they are right
for the installed torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from freezer.freezing.target.environment import cleared

MODULES = (
    "torch._inductor.config",
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch.fx.experimental._config",
    "torch.compiler.config",
)
"""The modules that configure how torch captures, freezes and compiles."""


@functools.cache
def fresh_module(name: str) -> ModuleType:
    """A second copy of a configuration module, executed without the variables that builds must not
    depend on.
    """
    first = sys.modules[name]
    spec = importlib.util.spec_from_file_location(f"{name}_of_coldpress", str(first.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a configuration module looks itself up there
    try:
        with cleared():
            spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def straying(name: str) -> dict[str, Any]:
    """The settings that the environment or a program has changed, with torch's defaults as
    values.
    """
    plain, now = fresh_module(name).get_config_copy(), sys.modules[name].get_config_copy()
    return {
        setting: plain[setting]
        for setting, value in now.items()
        if setting in plain and value != plain[setting]
    }


@contextlib.contextmanager
def without_environment() -> Iterator[None]:
    """Make torch behave as if none of its variables were set. Values that a program has set stay.

    Modules not yet imported read the cleared environment.
    """
    with contextlib.ExitStack() as stack:
        for name in MODULES:
            if name in sys.modules:
                _reset(sys.modules[name], fresh_module(name), stack)
        stack.enter_context(cleared())
        yield


def _reset(module: Any, plain: Any, stack: contextlib.ExitStack) -> None:
    """Give settings from the environment their plain values, until the stack is closed."""
    changed: dict[str, Any] = {}
    now, values = module.get_config_copy(), plain.get_config_copy()
    for name, entry in module._config.items():
        other = plain._config.get(name)
        if other is None or name not in values or _origin(entry) == _origin(other):
            continue
        if entry.env_value_force is not other.env_value_force:
            stack.callback(setattr, entry, "env_value_force", entry.env_value_force)
            entry.env_value_force = other.env_value_force
            changed[name] = values[name]
        elif now[name] in (
            entry.default,
            entry.env_value_default,
        ):  # otherwise a program has set it
            changed[name] = values[name]
    if changed:
        stack.enter_context(module.patch(changed))


def _origin(entry: Any) -> tuple[Any, Any, Any]:
    """The origin of a setting's value, unless a program sets it."""
    return entry.default, entry.env_value_force, entry.env_value_default
