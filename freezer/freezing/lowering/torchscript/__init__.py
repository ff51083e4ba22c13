"""The TorchScript lowering: torch.jit.freeze and its optimizations.

May import: freezer.freezing.lowering's shared modules and below.
Read first: torchscript.py.
"""
