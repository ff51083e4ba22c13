"""Payloads beside the winner's deciding one: for further thread counts and for slow sizes, and an
artifact that needs torch alone.

Read first: other_payloads.py.
"""

from freezer.freezing.payload_sets.other_payloads import with_other_payloads

__all__ = ["with_other_payloads"]
