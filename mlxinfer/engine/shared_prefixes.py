"""What of a request is computed already, by one that has ended or by one that runs. On the MLX thread."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mlxinfer.engine.prefix_node import shared_length
from mlxinfer.engine.scheduler import MIN_SHARED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlxinfer.engine.events import Open
    from mlxinfer.engine.prefix_store import PrefixStore
    from mlxinfer.engine.rows import RowSpec
    from mlxinfer.engine.tracked import SchedulerState, Tracked

log = logging.getLogger(__name__)


class SharedPrefixes:
    """Finds what open requests can take from the prefix cache and from each other; None as cache: nothing."""

    def __init__(self, prefixes: PrefixStore | None, state: SchedulerState, opened: Mapping[str, Open]) -> None:
        self._prefixes = prefixes
        self._state = state
        self._open = opened

    def relate(self, tracked: Tracked, spec: RowSpec) -> None:
        """Note what the cache seems to hold of a new request, and who is about to compute more of it."""
        if self._prefixes is None or tracked.whole:
            return
        limit = tracked.prompt_length - 1
        tracked.hint = self._prefixes.peek(spec.cache_key, spec.prompt_token_ids, limit)
        best = tracked.hint + MIN_SHARED - 1
        for other in self._open.values():
            theirs = other.request.spec
            leader = self._state.requests.get(theirs.request_id)
            if leader is None or theirs.cache_key != spec.cache_key:
                continue
            # What a leader hasn't computed by its last prompt token it computes as part of its reply.
            common = shared_length(spec.prompt_token_ids, theirs.prompt_token_ids)
            shared = min(common, limit, leader.prompt_length - 1)
            if self._state.needs_checkpoints:
                shared = max((b for b in leader.boundaries if b <= shared), default=0)
            if shared > best:
                best = tracked.shared = shared
                tracked.leader = theirs.request_id

    def claim(self, request_id: str, limit: int) -> int:
        """Claim what the cache holds of a request that starts. One that failed before computes everything itself."""
        tracked = self._state.requests[request_id]
        if self._prefixes is None or tracked.strikes or tracked.whole:
            return 0
        spec = self._open[request_id].request.spec
        tokens = (*spec.prompt_token_ids, *tracked.output)
        # Another that waits and would go on from the same place finds it, if it stays.
        waiting = (
            r for name, r in self._state.requests.items() if name not in self._state.started and r is not tracked
        )
        move = not any(r.hint for r in waiting)
        try:
            return self._prefixes.claim(request_id, spec.cache_key, tokens, limit, move=move)
        except Exception:
            # The worker's edge: a cache that fails is a cache that holds nothing.
            log.exception("the prefix cache failed")
            return 0
