"""Ledger: append-only segments, the lease, the campaign record, and the mirror of a bucket.

May import: pipeline.workspace and below.
Read first: ledger.py.
"""

from pipeline.ledger.campaigns import (
    CampaignRecord,
    Continued,
    History,
    Member,
    Reached,
    members_of,
)
from pipeline.ledger.lease import (
    Holder,
    LeaseLostError,
    campaign_lock,
    check_campaign,
    living_holder,
    read_holder,
)
from pipeline.ledger.ledger import (
    Draft,
    Ledger,
    ledger_folder,
    refuse_registry,
)
from pipeline.ledger.segments import (
    LEDGER,
    LedgerRow,
    RowKind,
    read_rows,
)

__all__ = [
    "LEDGER",
    "CampaignRecord",
    "Continued",
    "Draft",
    "History",
    "Holder",
    "LeaseLostError",
    "Ledger",
    "LedgerRow",
    "Member",
    "Reached",
    "RowKind",
    "campaign_lock",
    "check_campaign",
    "ledger_folder",
    "living_holder",
    "members_of",
    "read_holder",
    "read_rows",
    "refuse_registry",
]
