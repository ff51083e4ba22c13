"""Orchestration of a fleet: plan, build, judge, publish, report.

Read run.py first. Deployments never install this.
"""
