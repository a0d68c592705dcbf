"""The store of responses is bounded in every way, and nobody sees another's."""

from __future__ import annotations

from typing import Any

from mlxinfer.server.store import ResponseStore


def response(name: str, size: int = 0) -> dict[str, Any]:
    return {"id": name, "text": "x" * size}


def test_the_oldest_goes_when_there_are_too_many() -> None:
    store = ResponseStore(max_count=2)
    for name in "abc":
        store.put("", response(name), ())
    assert [store.get("", name) is not None for name in "abc"] == [False, True, True]


def test_the_oldest_go_when_they_are_too_large_and_one_that_is_larger_than_all_room_is_not_kept() -> None:
    store = ResponseStore(max_bytes=2500)
    store.put("", response("a", 1000), ())
    store.put("", response("b", 1000), ())
    store.put("", response("huge", 3000), ())
    assert store.get("", "huge") is None
    assert store.get("", "a") is not None
    store.put("", response("c"), ({"role": "user", "content": "y" * 1000},))
    assert [store.get("", name) is not None for name in "abc"] == [False, True, True]
    # Room that was given back can be used again.
    assert store.delete("", "b")
    store.put("", response("d", 1000), ())
    assert store.get("", "c") is not None


def test_a_response_is_forgotten_in_time() -> None:
    now = 0.0
    store = ResponseStore(ttl_s=10, clock=lambda: now)
    store.put("", response("a"), ())
    now = 9.0
    store.put("", response("b"), ())
    assert store.get("", "a") is not None
    now = 10.0
    assert store.get("", "a") is None
    assert store.get("", "b") is not None


def test_each_key_sees_its_own_only() -> None:
    store = ResponseStore()
    store.put("ann", response("a"), ())
    assert store.get("bob", "a") is None
    assert not store.delete("bob", "a")
    assert store.get("ann", "a") is not None


def test_a_flood_of_one_key_drives_out_its_own_and_not_what_another_keeps() -> None:
    for store in (ResponseStore(max_count=3), ResponseStore(max_bytes=400)):
        store.put("ann", response("first", 50), ())
        for i in range(20):
            store.put("bob", response(f"b{i}", 50), ())
        assert store.get("ann", "first") is not None
        assert store.get("bob", "b19") is not None
        assert store.get("bob", "b0") is None
