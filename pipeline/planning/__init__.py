"""Planning: keys, the plan, what earlier campaigns finished, memory estimates.

May import: pipeline.catalog and below.
Read first: plan.py.
"""
