"""Diagnostics: turn an error of torch into a sentence, a source line and a remedy.

May import: freezer.errors.
Read first: messages.py.
"""
