"""The HTML report of a campaign.

Read first: html_report.py.
"""
