"""Conversations on disk: a tree of messages each, searchable, in one SQLite file.

store = open_store(path)            # app, terminal and scripts may hold it at the same time
chat = store.create("smollm2-135m")
store.add(chat.id, "user", "Hi")
"""

from mlxinfer.app.store.opening import FILE, Opened, open_store
from mlxinfer.app.store.records import Conversation, Hit, Message
from mlxinfer.app.store.store import Store

__all__ = ["FILE", "Conversation", "Hit", "Message", "Opened", "Store", "open_store"]
