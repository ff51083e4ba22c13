"""What people and Prometheus see while a campaign runs.

Read first: display.py.
"""
