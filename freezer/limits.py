"""`Limits` and `SamplingPolicy` under the module name that scripts of earlier releases import."""

from freezer.spec import Limits, SamplingPolicy

__all__ = ["Limits", "SamplingPolicy"]
