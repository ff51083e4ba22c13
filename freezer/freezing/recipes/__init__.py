"""Recipes: which captures and lowerings make a candidate, and with which settings.

May import: freezer.artifact and below. Imports no torch.
Read first: recipes.py.
"""
