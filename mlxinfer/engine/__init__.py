"""The engine: scheduler (what next), runner (one step), ragged (attention), sampling, worker (the one MLX thread)."""
