"""`mlxinfer cluster`: one model over several Macs. Nothing lives here yet."""
