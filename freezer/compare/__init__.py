"""Comparison of outputs with a reference: distances, and the gate that judges them."""
