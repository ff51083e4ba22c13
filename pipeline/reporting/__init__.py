"""Reporting: the display, the report and the status of a campaign.

May import: pipeline.scheduling and below.
Read first: campaign_report.py.
"""

from pipeline.reporting.campaign_report import CampaignReport
from pipeline.reporting.comparison import OutcomeChange, PastOutcome, compare, past_outcomes
from pipeline.reporting.console_report import (
    explain_plan,
    print_report,
    result_table,
)
from pipeline.reporting.display import Display, LineDisplay, display_for
from pipeline.reporting.html_report import report_page
from pipeline.reporting.metrics import metered
from pipeline.reporting.status import (
    campaign_status,
    campaigns_in_words,
    driver_of,
    in_words,
)

__all__ = [
    "CampaignReport",
    "Display",
    "LineDisplay",
    "OutcomeChange",
    "PastOutcome",
    "campaign_status",
    "campaigns_in_words",
    "compare",
    "display_for",
    "driver_of",
    "explain_plan",
    "in_words",
    "metered",
    "past_outcomes",
    "print_report",
    "report_page",
    "result_table",
]
