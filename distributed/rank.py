"""`python -m mlxinfer.distributed.rank`: one rank. It holds a part of a model and does the steps it is told.

It is told over a channel by the process that has the scheduler. When that channel ends, so does the rank, wherever it
is: a collective that nobody answers can't be left in any other way.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxinfer.distributed import pulse, wire
from mlxinfer.distributed.frames import Channel, ChannelError
from mlxinfer.errors import MlxinferError

if TYPE_CHECKING:
    from mlxinfer.distributed.rank_runner import RankRunner
    from mlxinfer.engine.grammar import Grammars
    from mlxinfer.engine.rows import Launched

log = logging.getLogger(__name__)

ALIVE_S = 0.5
"""Seconds between two signs of life."""
FIRST_S = 60.0
"""Until the coordinator's first message, which waits for all ranks."""
GONE_S = 15.0
"""A coordinator that says nothing for so long is gone; it says something each second."""
LOST = 3
"""Exit code of a rank whose channel ended."""


def main() -> None:
    """Arguments: where to connect, which rank this is; the secret comes on stdin, one line."""
    parser = argparse.ArgumentParser(prog="python -m mlxinfer.distributed.rank")
    parser.add_argument("--connect", required=True)
    parser.add_argument("--rank", type=int, required=True)
    asked = parser.parse_args()
    secret = sys.stdin.buffer.readline().strip()
    host, _, port = asked.connect.rpartition(":")
    channel = Channel(socket.create_connection((host.strip("[]"), int(port)), timeout=10), secret, serving=False)
    ring = pulse.ring()
    own = pulse.Pulse(ring[asked.rank][0]) if len(ring) > 1 else None
    channel.send({"rank": asked.rank, "pid": os.getpid(), "pulse": 0 if own is None else own.port})
    Rank(channel, asked.rank, secret, own).run()


class Rank:
    """Messages in, outputs out, in the order of the messages."""

    def __init__(self, channel: Channel, rank: int, secret: bytes, own: pulse.Pulse | None) -> None:
        self._channel, self._rank, self._secret, self._pulse = channel, rank, secret, own
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._group: Any = None
        self._runner: RankRunner | None = None
        self._grammars: Grammars | None = None
        self._before: Launched | None = None
        self._steps = 0
        self._launched = -1
        """The last step's number."""

    def run(self) -> None:
        """Until the channel ends or a message says so."""
        threading.Thread(target=self._listen, name="listen", daemon=True).start()
        threading.Thread(target=self._live, name="alive", daemon=True).start()
        try:
            while True:
                message = self._inbox.get()
                if "stop" in message:
                    os._exit(0)
                for name, body in message.items():
                    getattr(self, f"_on_{name}")(body)
        except MlxinferError as error:
            self._failed(str(error))
        except Exception as error:
            # The process's edge: whoever waits has to hear why.
            log.exception("this rank failed")
            self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, why: str) -> None:
        try:
            self._channel.send({"failed": why})
        finally:
            os._exit(1)

    def _listen(self) -> None:
        patience = FIRST_S
        while True:
            try:
                message = self._channel.receive(patience)
                patience = GONE_S
            except ChannelError:
                # Not sys.exit: the other thread may stand in a collective for ever.
                os._exit(LOST)
            if not isinstance(message, dict) or not message.keys() <= MESSAGES:
                os._exit(LOST)
            if "still" not in message:
                self._inbox.put(message)

    def _live(self) -> None:
        wait = threading.Event()
        while not wait.wait(ALIVE_S):
            try:
                deaf = 0.0 if self._pulse is None else self._pulse.deaf_s()
                self._channel.send({"alive": self._steps, "deaf": deaf})
            except ChannelError:
                os._exit(LOST)

    # Messages

    def _on_next(self, body: Any) -> None:
        """The rank after this one, to be asked over the link whether it is there."""
        if self._pulse is not None:
            ring = pulse.ring()
            host, _ = ring[(self._rank + 1) % len(ring)]
            self._pulse.begin(self._secret, str(body["session"]), host, int(body["port"]))

    def _on_load(self, body: Any) -> None:
        """Another model in the place of the one before, if there was one."""
        import mlx.core as mx

        from mlxinfer import kernels
        from mlxinfer.config import load_settings
        from mlxinfer.distributed import shards
        from mlxinfer.distributed.rank_runner import RankRunner
        from mlxinfer.engine.grammar import Grammars
        from mlxinfer.tokenizer import Tokenizer

        kernels.enable(load_settings())
        self._join(body)
        if self._runner is not None:
            self._runner.close()
        self._runner = self._grammars = self._before = None
        mx.clear_cache()
        folder = Path(body["folder"])
        model, config, part = shards.load(folder, self._group, dtype=body.get("dtype", "auto"))
        vocab = int((config.get("text_config") or config)["vocab_size"])
        self._runner = RankRunner(model, vocab, config, self._group, part)
        if self._rank == 0:
            self._grammars = Grammars(Tokenizer.from_folder(folder), vocab)
        self._channel.send({"ready": _told(self._runner, model)})

    def _on_probe(self, body: Any) -> None:
        from mlxinfer.distributed.probing import probe

        self._join(body)
        self._channel.send({"ready": probe(self._group)})

    def _join(self, body: Any) -> None:
        """The group, once in a process's life."""
        import mlx.core as mx

        if self._group is None and body["size"] > 1:
            self._group = mx.distributed.init(strict=True, backend=body["backend"])

    def _on_admit(self, body: Any) -> None:
        spec, grammar = wire.spec_in(body)
        compiled = None
        if grammar is not None and self._grammars is not None:
            compiled = self._grammars.compile(grammar)
        self._held.admit(spec, compiled)

    def _on_adapter(self, body: Any) -> None:
        """Requests may be for this one from now on."""
        from mlxinfer.engine.adapter_files import read_adapter

        name, folder = str(body["name"]), str(body["folder"])
        if folder:
            self._held.adapters.add(read_adapter(name, Path(folder)))
        else:
            self._held.adapters.add_elsewhere(name)

    def _on_prefix(self, body: Any) -> None:
        """What the next step has to do with the prefix cache."""
        self._held.held_prefixes.take(wire.prefixes_in(body))

    def _on_step(self, body: Any) -> None:
        """As the engine does it with a runner of its own: launch, then read the step before."""
        step = wire.step_in(body)
        launched = self._held.launch(step)
        self._held.held_prefixes.settle()
        self._launched = step.number
        before, self._before = self._before, launched
        if before is not None:
            before.follow()
            if not before.guided:
                self._tell(before)
        launched.submit()
        if before is not None and before.guided:
            self._tell(before)
        launched.choose()
        launched.submit()
        if launched.choice is None:
            self._before = None
            self._tell(launched)

    def _on_read(self, _: Any) -> None:
        """No step follows for now."""
        before, self._before = self._before, None
        if before is not None:
            self._tell(before)

    def _on_forget(self, body: Any) -> None:
        self._held.forget(str(body))

    def _on_digest(self, body: Any) -> None:
        """Say what is held here."""
        self._held.held_prefixes.settle()
        self._channel.send({"digest": {"asked": body, "step": self._launched, **self._held.digest()}})

    @property
    def _held(self) -> RankRunner:
        if self._runner is None:
            raise ChannelError("a step came before the model")
        return self._runner

    def _tell(self, launched: Launched) -> None:
        out = launched.read()
        self._steps += 1
        if self._rank == 0:
            self._channel.send({"out": wire.outputs_out(out), "number": launched.step.number})


MESSAGES = {"still", "next", "load", "probe", "adapter", "admit", "prefix", "step", "read", "forget", "digest", "stop"}


def _told(runner: RankRunner, model: Any) -> dict[str, Any]:
    """What the scheduler has to know of the model."""
    import dataclasses

    from mlxinfer.engine.dtypes import weight_bytes

    return {
        "tier": runner.tier,
        "view": None if runner.view is None else runner.view.mask_rank,
        "fused": runner.fused,
        "needs_checkpoints": runner.needs_checkpoints,
        "restores": runner.restores,
        "exact": runner.exact,
        "kv": dataclasses.astuple(runner.kv_cost),
        "weight_bytes": weight_bytes(model),
    }


if __name__ == "__main__":
    main()
