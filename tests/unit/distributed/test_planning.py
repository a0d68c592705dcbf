"""Plans over made-up clusters: what is refused and why, and that more of a good thing is better."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from mlxinfer.distributed.cluster_file import Cluster, Kind, Link, Node
from mlxinfer.distributed.facts import facts_of
from mlxinfer.distributed.planning import Plan, plan
from mlxinfer.errors import InvalidRequestError, WontFitError
from tests import tiny

SPEED = {"thunderbolt5": (30.0, 6.1), "thunderbolt4": (300.0, 2.0), "ethernet": (100.0, 1.1), "wifi": (8000.0, 0.1)}
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
QWEN_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
SMOLLM2 = tiny.config(
    hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64, intermediate_size=1536
)


def cluster(count: int, kind: Kind = "thunderbolt5", memory_gb: float = 64) -> Cluster:
    nodes = tuple(Node(f"n{i}", f"h{i}", memory_gb, 400) for i in range(count))
    latency, rate = SPEED[kind]
    links = tuple(
        Link((a.name, b.name), kind, latency, rate, (a.host, b.host))
        for at, a in enumerate(nodes)
        for b in nodes[at + 1 :]
    )
    return Cluster(nodes, links, "x" * 16)


def of_kind(found: tuple[Plan, ...], kind: str, size: int) -> Plan:
    return next(made for made in found if made.kind == kind and made.size == size)


def test_facts_are_counted_from_the_config() -> None:
    facts = facts_of(LLAMA_8B)
    assert facts.parameters == 8_030_261_248
    assert facts.weight_bytes == 4 * facts.parameters
    assert facts.num_layers == 32
    assert facts.layer_bytes[0] == 4 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
    assert facts.kv_bytes_per_token == 2 * 8 * 128 * 4
    assert not facts.no_tensor
    assert facts.no_pipeline


def test_over_a_fast_link_heads_are_split_and_over_a_slow_one_a_machine_does_better_alone() -> None:
    assert plan(cluster(2), LLAMA_8B).plans[0].kind == "tensor"
    slow = plan(cluster(2, "ethernet"), SMOLLM2 | {"num_attention_heads": 8, "num_key_value_heads": 4}).plans[0]
    assert slow.kind == "one"


def test_more_nodes_on_a_fast_link_are_faster_and_hold_less_each() -> None:
    found = plan(cluster(4), LLAMA_8B).plans
    two, four = of_kind(found, "tensor", 2), of_kind(found, "tensor", 4)
    assert four.tok_s > two.tok_s > of_kind(found, "one", 1).tok_s
    assert four.bytes_per_rank[0] < two.bytes_per_rank[0]


def test_what_holds_on_no_node_is_spread_over_several() -> None:
    found = plan(cluster(2, memory_gb=24), LLAMA_8B)
    assert {made.kind for made in found.plans} == {"tensor"}
    assert sum("would need" in refusal.why for refusal in found.refusals) == 2


def test_a_pipeline_holds_all_layers_and_serves_more_streams_than_it_speeds_one_up() -> None:
    found = plan(cluster(3), QWEN_MOE, objective="throughput").plans
    staged = of_kind(found, "pipeline", 3)
    assert sum(staged.split) == 12
    assert staged.throughput_tok_s > 2 * staged.tok_s
    assert staged.nodes[0] == "n0"
    assert staged.tok_s < of_kind(found, "one", 1).tok_s


def test_uneven_memory_gives_uneven_stages_that_fit() -> None:
    made = cluster(2)
    small = dataclasses.replace(made.nodes[1], memory_gb=1.0)
    staged = of_kind(plan(dataclasses.replace(made, nodes=(made.nodes[0], small)), QWEN_MOE).plans, "pipeline", 2)
    assert staged.split[0] > staged.split[1]
    assert staged.bytes_per_rank[1] < 0.5e9


def test_pairs_in_a_pipeline_hold_half_of_a_stage_each_and_stay_experimental() -> None:
    found = plan(cluster(4), QWEN_MOE).plans
    both, staged = of_kind(found, "both", 4), of_kind(found, "pipeline", 2)
    assert (both.tensor, len(both.split), sum(both.split)) == (2, 2, 12)
    assert both.experimental
    assert both.bytes_per_rank[0] < 0.6 * max(staged.bytes_per_rank)
    # A token reads as much as over two machines that share every layer; a swap is quicker than a sum around a ring.
    assert staged.tok_s < both.tok_s < 1.1 * of_kind(found, "tensor", 2).tok_s
    slow = plan(cluster(4, "ethernet"), QWEN_MOE).plans
    assert of_kind(slow, "both", 4).tok_s < of_kind(slow, "pipeline", 2).tok_s


def test_heads_that_cannot_be_shared_are_refused_with_the_numbers() -> None:
    found = plan(cluster(3), SMOLLM2)
    why = {refusal.what: refusal.why for refusal in found.refusals}
    assert "9 heads can't be shared by 2 ranks; 3 ranks would do" in why["tensor: n0 + n1"]
    assert any(made.kind == "tensor" and made.size == 3 for made in found.plans)


@pytest.mark.parametrize("size", [2, 4])
def test_groups_of_packed_weights_are_not_cut(size: int) -> None:
    packed = LLAMA_8B | {"intermediate_size": 64 * 7 * 3, "quantization": {"group_size": 64, "bits": 4}}
    why = {refusal.what: refusal.why for refusal in plan(cluster(size), packed).refusals}
    assert "can't be cut for" in why["tensor: " + " + ".join(f"n{i}" for i in range(size))]


def test_wifi_is_taken_only_when_it_is_asked_for() -> None:
    made = cluster(2, "wifi", memory_gb=24)
    with pytest.raises(WontFitError, match="joined by Wi-Fi only"):
        plan(made, LLAMA_8B)
    found = plan(made, LLAMA_8B, wifi=True).plans[0]
    assert found.wifi
    assert "wifi" in found.links[0]


def test_nodes_that_nothing_joins_are_told() -> None:
    made = dataclasses.replace(cluster(2, memory_gb=24), links=())
    with pytest.raises(WontFitError, match="nothing joins n0 and n1"):
        plan(made, LLAMA_8B)


def test_code_without_a_split_is_told() -> None:
    config: dict[str, Any] = dict(tiny.config()) | {"model_type": "gemma"}
    why = {refusal.why for refusal in plan(cluster(2), config).refusals}
    assert any("no split by heads" in one for one in why)
    assert any("no split by layers" in one for one in why)


def test_refusing_takes_less_than_a_second_and_loads_nothing() -> None:
    began = time.perf_counter()
    with pytest.raises(WontFitError):
        plan(cluster(2, memory_gb=2), LLAMA_8B)
    assert time.perf_counter() - began < 10  # a loaded machine; a second on a quiet one


def test_a_context_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="context is 0"):
        plan(cluster(1), LLAMA_8B, context=0)
