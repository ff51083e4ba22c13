"""Stable forms of operators, which exported programs get before an engine's converter sees them.

The converters write logarithms of sums out as they stand in a textbook: `log(sigmoid(x))` is -inf
from x = -16.7 down in ONNX Runtime, -87 in OpenVINO. And a row of an attention mask without keys,
for which eager gives zeros, becomes NaN or the average of all values. Engines also compute some
integers and draw random numbers otherwise than torch, which builds refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Interpreter, Node
from torch.nn import functional as F  # noqa: N812

from freezer.errors import BuildError
from freezer.freezing.capture import Captured
from freezer.runtime.input_sets import is_mask
from freezer.runtime.tensors import tensors_in
from freezer.spec import TensorSpec

aten = torch.ops.aten

_MEAN, _SUM = 1, 2
"""Numbers of reductions in ATen."""


def with_stable_forms(program: ExportedProgram) -> ExportedProgram:
    """The program with the operators of `_FORMS` in stable form; itself if it has none."""
    if not any(node.target in _FORMS for node in program.graph.nodes):
        return program
    changed: ExportedProgram = program.run_decompositions(dict(_FORMS))
    return changed


def _log_sigmoid(x: Tensor) -> Tensor:
    return x.clamp(max=0) - _log1p(torch.exp(-x.abs()))


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    apart = (a - b).abs()
    apart = torch.where(a == b, 0.0, apart)  # of equal infinities
    return torch.maximum(a, b) + _log1p(torch.exp(-apart))


def _log1p(x: Tensor) -> Tensor:
    """Kahan's form: the rounding of 1 + x cancels.

    Source: Goldberg, "What every computer scientist should know about floating-point arithmetic"
    (1991), theorem 4.
    """
    sum_ = 1 + x
    share = torch.where(sum_ == x, 1.0, x / (sum_ - 1))  # of large values, and of infinity
    return torch.where(sum_ == 1, x, torch.log(sum_) * share)


def _expm1(x: Tensor) -> Tensor:
    """By tanh(x / 2) = (exp(x) - 1) / (exp(x) + 1)."""
    return torch.tanh(x / 2) * (torch.exp(x) + 1)


def _bce_with_logits(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    positive = 1.0 if pos_weight is None else 1 + (pos_weight - 1) * target
    losses = (1 - target) * x - positive * _log_sigmoid(x)
    if weight is not None:
        losses = losses * weight
    if reduction == _MEAN:
        return losses.mean()
    return losses.sum() if reduction == _SUM else losses


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Attention whose mask leaves each row a key, with zeros in the rows that had none."""
    if attn_mask is None or attn_mask.dtype != torch.bool:
        return NotImplemented
    has_keys = attn_mask.any(-1, keepdim=True)
    added = torch.where(attn_mask | ~has_keys, 0.0, -torch.inf).to(q.dtype)
    attended = F.scaled_dot_product_attention(q, k, v, added, *args, **kwargs)
    return torch.where(has_keys, attended, 0.0)


_FORMS: dict[Any, Callable[..., Any]] = {
    aten.log_sigmoid.default: _log_sigmoid,
    aten.log_sigmoid_forward.default: lambda x: (_log_sigmoid(x), x),
    aten.logaddexp.default: _logaddexp,
    aten.log1p.default: _log1p,
    aten.expm1.default: _expm1,
    aten.binary_cross_entropy_with_logits.default: _bce_with_logits,
    aten.scaled_dot_product_attention.default: _attention,
}


_INT32 = torch.iinfo(torch.int32)

_PROBES = (0, -1, _INT32.min, _INT32.max)
"""Values of all inputs in a run, each within what its input may be; floats are five times as large,
and so may leave 32 bits.
"""

_DIVISIONS = ("floor_divide", "remainder", "fmod", "div")


def check_numbers(captured: Captured, *, in_64_bits: bool) -> None:
    """Check that an engine computes the integers of a program as torch does, and that it draws no
    random numbers: all sessions of ONNX Runtime in a process draw the same ones, and its Dropout
    keeps or drops the first element alike in all calls. OpenVINO has no counterparts.

    Args:
        captured: an exported program with its inputs.
        in_64_bits: whether the engine computes int64 in 64 bits.

    Raises:
        BuildError: a value may leave 32 bits, a divisor may be 0 or -1, or a number is drawn.
    """
    program = captured.program
    examples = program.example_inputs[0]
    for value in _PROBES:
        pairs = zip(captured.inputs, examples, strict=True)
        inputs = tuple(_filled(item, example, value) for item, example in pairs)
        watch = _Watch(program.graph_module, in_64_bits=in_64_bits)
        try:
            with torch.no_grad():
                watch.run(*program._graph_module_flat_inputs(inputs, {}))
        except Exception:  # the program takes no such values, or a problem was found
            pass
        if watch.problem:
            raise BuildError(watch.problem)


def _filled(item: TensorSpec, example: Tensor, value: int) -> Tensor:
    """An input of one value, or of the nearest that it may have; the loaders check indices, and
    that integers have 32 bits.
    """
    if item.indices is not None:
        value = min(max(value, item.indices[0]), item.indices[1])
    elif item.dtype == "bool" or is_mask(item):
        value = int(value > 0)
    elif example.dtype.is_floating_point:
        limits = torch.finfo(example.dtype)
        return torch.full_like(example, min(max(5.0 * value, limits.min), limits.max))
    else:
        bounds = torch.iinfo(example.dtype)
        value = min(max(value, bounds.min), bounds.max)
    return torch.full_like(example, value)


class _Watch(Interpreter):
    """Runs a program until a number is computed that an engine computes otherwise.

    Attributes:
        problem: what was found, and its remedies; None if nothing.
    """

    def __init__(self, module: torch.fx.GraphModule, *, in_64_bits: bool) -> None:
        super().__init__(module)
        self.problem: str | None = None
        self._in_64_bits = in_64_bits

    def run_node(self, n: Node) -> Any:
        """Run a node, and look at what it takes and gives."""
        name = n.target.__name__ if callable(n.target) else str(n.target)
        if _is_integer(n) and name.partition(".")[0] in _DIVISIONS:
            self._find(n, "an integer may be divided by 0 or -1", _divides(self._operands(n)))
        state = torch.get_rng_state()
        result = super().run_node(n)
        if n.users:  # numbers for training alone are drawn, too, and have none
            drawn = not torch.equal(state, torch.get_rng_state())
            problem = "a random number is drawn, and the engine would draw others"
            self._find(n, problem, drawn, "pass `training=self.training`")
        if not self._in_64_bits and _is_integer(n):
            values = tensors_in(self._operands(n))
            numbers = not any(value.isnan().any() or value.isinf().any() for value in values)
            beyond = numbers and isinstance(result, Tensor) and _beyond(result)
            self._find(n, "a value may leave the 32 bits that it computes in", beyond)
        return result

    def _operands(self, node: Node) -> tuple[Any, ...]:
        return self.fetch_args_kwargs_from_env(node)[0]

    def _find(
        self,
        node: Node,
        problem: str,
        found: bool,
        remedy: str = "bound the values (clamp)",
    ) -> None:
        if found:
            trace = str(node.meta.get("stack_trace", "")).strip().splitlines()
            line = f" at `{trace[-1].strip()}`" if trace else ""
            self.problem = (
                f"{problem} ({node.target}{line}); use inductor-frozen, {remedy}, or compute them"
                " outside the model"
            )
            raise ValueError(self.problem)


def _is_integer(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)


def _divides(operands: tuple[Any, ...]) -> bool:
    divisor = operands[1] if isinstance(operands[1], Tensor) else torch.tensor(operands[1])
    return bool(((divisor == 0) | (divisor == -1)).any())


def _beyond(result: Tensor) -> bool:
    return bool(result.numel() and (result.min() < _INT32.min or result.max() > _INT32.max))
