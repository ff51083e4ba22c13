"""Input and output contracts: tensors, dims, ranges, nested structure, and how declarations are
parsed.

May import: freezer.files and below. Imports no torch.
Read first: inputs.py.
"""
