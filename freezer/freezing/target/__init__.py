"""Targets: the device class, thread counts, toolchain and environment that a build is for.

May import: freezer.freezing.models and below.
Read first: target.py.
"""
