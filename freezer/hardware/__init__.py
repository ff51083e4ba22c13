"""Hardware: device classes, this machine, instruction sets, GPUs, control groups, peak memory.

May import: freezer.spec and below.
Read first: device_classes.py.
"""
