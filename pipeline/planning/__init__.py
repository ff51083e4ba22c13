"""Planning: keys, the plan with finished work of earlier campaigns, memory estimates.

May import: pipeline.catalog and below.
Read first: plan.py.
"""
