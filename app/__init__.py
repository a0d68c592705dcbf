"""`mlxinfer app`: the desktop chat. Nothing lives here yet."""
