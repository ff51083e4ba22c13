"""The Inductor lowering: AOTInductor packages with frozen weights.

May import: freezer.freezing.lowering's shared modules and below.
Read first: compilation.py.
"""
