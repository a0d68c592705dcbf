"""`mlxinfer convert`: any published checkpoint in, an MLX model out. Nothing lives here yet."""
