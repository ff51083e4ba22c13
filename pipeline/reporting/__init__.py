"""Reporting: the display, the report and the status of a campaign.

May import: pipeline.scheduling and below.
Read first: campaign_report.py.
"""
