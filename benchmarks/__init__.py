"""Measurements behind the figures in the documentation; each writes its tables with the machine,
the versions and its command.
"""
