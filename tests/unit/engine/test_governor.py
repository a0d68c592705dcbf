"""Memory is shared out between models, and idle prefixes give way first."""

from dataclasses import dataclass

import pytest

from mlxinfer.engine.governor import HEADROOM, Governor
from mlxinfer.engine.memory import KVCost
from mlxinfer.errors import WontFitError

WHOLE = 1000
BUDGET = int(WHOLE * (1 - HEADROOM))


@dataclass
class Fake:
    weight_bytes: int = 0
    reserved: int = 0
    cached: int = 0
    limit: int | None = None

    def reserved_bytes(self) -> int:
        return self.reserved

    def cached_bytes(self) -> int:
        return self.cached

    def shrink_cache(self, max_bytes: int) -> None:
        self.limit = max_bytes
        self.cached = min(self.cached, max_bytes)


def governed(*members: Fake) -> Governor:
    governor = Governor(WHOLE)
    for member in members:
        governor.join(member)
    return governor


def test_sequences_may_take_what_weights_and_the_sequences_of_others_leave():
    one, other = Fake(weight_bytes=100), Fake(weight_bytes=200, reserved=50, cached=300)
    assert governed(one, other).kv_limit(one) == BUDGET - 300 - 50


def test_idle_prefixes_of_other_models_shrink_before_the_models_own():
    one, other = Fake(weight_bytes=100, reserved=300, cached=200), Fake(weight_bytes=100, cached=250)
    governed(one, other).balance(one)
    spare = BUDGET - 200 - 300
    assert one.cached == 200
    assert other.cached == spare - 200
    assert one.limit == spare - other.cached


def test_when_nothing_is_spare_every_prefix_goes_and_idle_models_are_asked_for():
    one, other = Fake(weight_bytes=500, reserved=500, cached=200), Fake(weight_bytes=100, cached=250)
    governor = governed(one, other)
    asked: list[int] = []
    governor.on_pressure = asked.append
    governor.balance(one)
    assert one.cached == other.cached == 0
    assert asked == [1100 - BUDGET]


def test_a_member_that_left_counts_no_more():
    one, other = Fake(weight_bytes=100), Fake(weight_bytes=300)
    governor = governed(one, other)
    governor.leave(other)
    governor.leave(other)
    assert governor.kv_limit(one) == BUDGET - 100


def test_what_can_never_run_is_refused_with_the_figures():
    one = Fake(weight_bytes=100)
    governor = governed(one)
    governor.check_fits(one, BUDGET - 100, "a request")
    with pytest.raises(WontFitError, match=r"a request needs .* MiB"):
        governor.check_fits(one, BUDGET - 99, "a request")


def test_the_figures_add_up():
    figures = governed(Fake(100, 20, 30), Fake(1, 2, 3)).figures()
    assert (figures.weights, figures.kv, figures.prefix_cache) == (101, 22, 33)
    assert figures.free == BUDGET - 156


def test_a_budget_of_the_users_own_replaces_the_machines():
    governor = Governor()
    machine = governor.budget
    governor.set_budget(WHOLE)
    assert governor.budget == BUDGET
    governor.set_budget(None)
    assert governor.budget == machine > BUDGET


def test_the_cost_of_a_sequence_counts_steps_windows_and_states():
    cost = KVCost(per_token=10, windowed=((300, 2), (100, 1)), fixed=7, step=256)
    assert cost.bytes(1) == 7 + 10 * 256 + 2 * 256 + 100
    assert cost.bytes(257) == 7 + 10 * 512 + 2 * 300 + 100


def test_idle_prefixes_make_room_for_a_model_that_is_about_to_be_loaded(monkeypatch):
    one, other = Fake(weight_bytes=100, cached=300), Fake(weight_bytes=100, cached=200)
    governor = governed(one, other)
    monkeypatch.setattr("mlxinfer.engine.governor.mx.get_active_memory", lambda: 200 + 500)
    assert governor.held_bytes() == 200
    governor.reclaim(BUDGET - 200 - 250)
    assert one.cached + other.cached == 250
    governor.reclaim(BUDGET)
    assert one.cached == other.cached == 0
