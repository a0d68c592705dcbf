"""`mlxinfer app`: the desktop chat: conversations, replies, the page and the door before it."""
