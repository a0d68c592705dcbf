"""A seeded slice of the fuzz run; `python -m tests.fuzz` is the whole."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from tests.fuzz.campaign import Campaign, server

if TYPE_CHECKING:
    from pathlib import Path

REQUESTS = 2000


def test_mutated_requests_are_answered_and_harm_nobody(tmp_path: Path) -> None:
    with server(tmp_path) as url, contextlib.closing(Campaign(url, seed=2026)) as campaign:
        campaign.run(REQUESTS)
    assert campaign.findings == [], json.dumps(campaign.findings[:5], indent=1)
    # Some of them are good, so that the campaign is not about refusals only.
    assert campaign.statuses[200] > REQUESTS / 10
    assert campaign.statuses[400] > REQUESTS / 4
