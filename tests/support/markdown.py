"""Pages of the documentation."""

from __future__ import annotations

import re

FENCED = re.compile(r"```.*?```", re.DOTALL)


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page), re.MULTILINE)
    texts = (
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings
    )
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}
