"""Reporting: the display, the report and the status of a campaign.

May import: pipeline.scheduling and below.
Read first: campaign_report.py.
"""

from pipeline.reporting.campaign_report import CampaignReport
from pipeline.reporting.comparison import OutcomeChange, compare
from pipeline.reporting.console_report import print_next_steps, print_report
from pipeline.reporting.explain import explain_plan
from pipeline.reporting.html.html_report import report_page
from pipeline.reporting.live.campaign_progress import ItemWork
from pipeline.reporting.live.display import Display, LineDisplay, display_for
from pipeline.reporting.live.metrics import metered
from pipeline.reporting.model_history import PastOutcome, past_outcomes
from pipeline.reporting.status import (
    campaign_status,
    campaigns_in_words,
    in_words,
    status_if_known,
)
from pipeline.reporting.terminal_table import Columns, fitting_table

__all__ = [
    "CampaignReport",
    "Columns",
    "Display",
    "ItemWork",
    "LineDisplay",
    "OutcomeChange",
    "PastOutcome",
    "campaign_status",
    "campaigns_in_words",
    "compare",
    "display_for",
    "explain_plan",
    "fitting_table",
    "in_words",
    "metered",
    "past_outcomes",
    "print_next_steps",
    "print_report",
    "report_page",
    "status_if_known",
]
