"""`mlxinfer cluster`: one model over several machines."""

from __future__ import annotations

from mlxinfer.cli import options
from mlxinfer.cli.subverbs import Subverbs

cluster = Subverbs(
    "cluster",
    {
        "init": ("mlxinfer.cli.cluster_init:init", "Write a cluster.toml with a new secret."),
        "agent": ("mlxinfer.cli.cluster_agent:agent", "Run on each machine: starts its part of a model."),
        "facts": ("mlxinfer.cli.cluster_facts:facts", "What this machine would be in a cluster."),
        "check": ("mlxinfer.cli.cluster_check:check", "Ask the machines, measure the links, say what to mend."),
        "plan": ("mlxinfer.cli.cluster_plan:plan", "Say how a model would be spread, and how fast it would be."),
        "shard": ("mlxinfer.cli.cluster_shard:shard", "Cut a model for the machines, ahead of time."),
        "run": ("mlxinfer.cli.cluster_run:run", "Run any script over the machines."),
        "status": ("mlxinfer.cli.cluster_status:status", "Say which machines answer and what runs on them."),
        "serve": ("mlxinfer.cli.cluster_serve:serve", "Serve a model over the machines."),
        "proxy": ("mlxinfer.cli.cluster_proxy:proxy", "Write a HAProxy configuration for whole servers side by side."),
    },
    help="Run one model over several machines.",
    epilog=options.example(
        "mlxinfer cluster init --node studio=10.0.0.1:192:800 --node mini=10.0.0.2:64:273",
        "mlxinfer cluster plan ./my-model",
        "mlxinfer cluster serve ./my-model",
    ),
)
