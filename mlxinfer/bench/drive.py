"""Run the clients of one phase against one server, and return what happened to each request."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from mlxinfer.bench.client import Record, ask, new_http

if TYPE_CHECKING:
    import httpx

    from mlxinfer.bench.client import Endpoint
    from mlxinfer.bench.workloads import Client, Phase


def drive(endpoint: Endpoint, phase: Phase, *, timeout_s: float) -> list[Record]:
    """All records of `phase`, in the order of its clients and their calls. Blocks until the last request has ended."""
    return asyncio.run(_Driver(endpoint, phase, timeout_s).run())


class _Driver:
    """The clients of one phase and what they have to know of each other."""

    def __init__(self, endpoint: Endpoint, phase: Phase, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._phase = phase
        self._timeout_s = timeout_s
        # Set when a client has the chunks that later ones wait for, or will never have them.
        self._live = [asyncio.Event() for _ in phase.clients]
        self._needed = max((client.when_live for client in phase.clients), default=0)

    async def run(self) -> list[Record]:
        async with new_http(self._endpoint.url) as http, asyncio.TaskGroup() as group:
            began = time.perf_counter()
            tasks = [group.create_task(self._client(http, i, c, began)) for i, c in enumerate(self._phase.clients)]
        return [record for task in tasks for record in task.result()]

    async def _client(self, http: httpx.AsyncClient, index: int, client: Client, began: float) -> list[Record]:
        try:
            if client.when_live:
                for other in self._live[:index]:
                    await other.wait()
            if (wait := began + client.after_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            return await self._calls(http, index, client)
        finally:
            self._live[index].set()

    async def _calls(self, http: httpx.AsyncClient, index: int, client: Client) -> list[Record]:
        records: list[Record] = []
        history: list[dict[str, str]] = []

        def on_text(count: int) -> None:
            if count >= self._needed:
                self._live[index].set()

        for turn, call in enumerate(client.calls):
            messages = [*history, *call.messages]
            record = Record(call.label, self._phase.name, index, turn)
            records.append(record)
            await ask(
                http,
                self._endpoint,
                messages,
                call.max_tokens,
                record,
                timeout_s=self._timeout_s,
                on_text=on_text,
            )
            if client.conversation:
                if record.error is not None:
                    break  # what follows would be another conversation than the one that was meant
                history = [*messages, {"role": "assistant", "content": record.text}]
        return records
