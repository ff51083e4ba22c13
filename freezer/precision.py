"""Full precision of float32 on a CPU, whatever this process has set: of what is built, and of eager in a judge.

Inductor packs weights for bfloat16 where a process allows less, and the payload would compute so wherever it is served; an eager
model that computes so has an error beside which any drift looks small.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_OPERATIONS = ("matmul", "conv", "rnn")
_FULL, _UNSET, _FEWER_BITS = "ieee", "none", ("tf32", "bf16")


@contextlib.contextmanager
def plain_precision() -> Iterator[None]:
    """Without what `torch.set_float32_matmul_precision` and `torch.backends.mkldnn.*.fp32_precision` allow in this process."""
    with contextlib.ExitStack() as stack:
        for operation in _OPERATIONS:
            _full(operation, stack)
        before = torch.get_float32_matmul_precision()
        if before != "highest":
            torch.set_float32_matmul_precision("highest")
            stack.callback(torch.set_float32_matmul_precision, before)
        yield


def _full(operation: str, stack: contextlib.ExitStack) -> None:
    """Let oneDNN compute an operation in full precision, until the stack is unwound."""
    before = torch._C._get_fp32_precision_getter("mkldnn", operation)
    if before not in _FEWER_BITS:
        return
    torch._C._set_fp32_precision_setter("mkldnn", operation, _FULL)

    def put_back() -> None:
        torch._C._set_fp32_precision_setter("mkldnn", operation, _UNSET)
        if torch._C._get_fp32_precision_getter("mkldnn", operation) != before:  # it was set here, and not for all operations
            torch._C._set_fp32_precision_setter("mkldnn", operation, before)

    stack.callback(put_back)
