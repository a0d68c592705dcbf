"""`python -m tests.fuzz [--requests N] [--seed S]`: a real server on a tiny model against mutated requests.

No answer may be a 5xx (but 503 where it is full), no connection may drop, nothing may take longer than five seconds,
and a canary request, every 20th and after each finding, has to give the same text as at the start. Prints findings as
JSON lines and a summary; the exit status says whether there were any.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from tests.fuzz.campaign import Campaign, server


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        server(Path(folder)) as url,
        contextlib.closing(Campaign(url, args.seed)) as campaign,
    ):
        campaign.run(args.requests)
    print(campaign.summary())
    return 1 if campaign.findings else 0


if __name__ == "__main__":
    sys.exit(main())
