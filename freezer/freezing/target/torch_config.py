"""torch's settings as they are where the environment says nothing.

torch's configuration modules take the defaults of their settings from the environment when they are imported, which may have been
long before a build; some variables even win over what a program sets. What they would hold without any is read from the modules
themselves, executed anew in an environment without those variables, so that it is right for whatever torch is installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator, Mapping
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
"""What settles how torch captures, freezes and compiles."""


@functools.cache
def module_anew(name: str) -> ModuleType:
    """A second copy of a configuration module, made without the variables that builds are not to depend on."""
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


def plain_settings(name: str) -> Mapping[str, Any]:
    """The settings of a configuration module where neither the environment nor a program says anything."""
    found: Mapping[str, Any] = module_anew(name).get_config_copy()
    return found


def straying(name: str) -> dict[str, Any]:
    """What is set otherwise now, by the environment or by a program, with the values that torch has by default."""
    plain, now = plain_settings(name), sys.modules[name].get_config_copy()
    return {setting: plain[setting] for setting, value in now.items() if setting in plain and value != plain[setting]}


@contextlib.contextmanager
def without_environment() -> Iterator[None]:
    """Let torch work as if no variable of its own were set. What a program has set stays.

    A module that is not imported yet needs nothing: the variables are out of the environment meanwhile.
    """
    with contextlib.ExitStack() as stack:
        for name in MODULES:
            if name in sys.modules:
                _reset(sys.modules[name], module_anew(name), stack)
        stack.enter_context(cleared())
        yield


def _reset(module: Any, plain: Any, stack: contextlib.ExitStack) -> None:
    """Give the settings that came from the environment their plain values, until the stack is unwound."""
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
        elif now[name] in (entry.default, entry.env_value_default):  # else a program has set it
            changed[name] = values[name]
    if changed:
        stack.enter_context(module.patch(changed))


def _origin(entry: Any) -> tuple[Any, Any, Any]:
    """Where a setting's value comes from, if no program sets it."""
    return entry.default, entry.env_value_force, entry.env_value_default
