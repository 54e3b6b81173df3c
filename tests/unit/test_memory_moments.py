"""Memory over a step: every moment of a tiny GRPO in bytes written out, the reserve, the KV pool, and their words.

The model has 2 layers, hidden 64, 4 heads of 16, 2 KV heads, feed-forward 128 (gated), vocabulary 1,000, and untied
embeddings. Parameters of a layer: q and output 64*64 each, k and v 64*32 each, three projections of 64*128, two norms
of 64: 8,192 + 4,096 + 24,576 + 128 = 36,992.
"""

from __future__ import annotations

import json

import attrs
import pytest

from rpeg_core.costing.kv_pool import ENGINE_FRACTION
from rpeg_core.costing.memory import Phase
from rpeg_core.costing.moments import first_step_growth, memory_moments
from rpeg_core.costing.reserve import runtime_reserve
from rpeg_core.planning.planner import Planner
from rpeg_core.plugins.registry import Registry
from rpeg_core.report.moments import MemoryReport, moment_table, notes, peak_terms
from rpeg_core.report.page import draw
from rpeg_core.spec.experiment import parse_experiment

LAYER = 36_992
ACTOR = 2 * LAYER + 2 * 64_000 + 64  # embedding, head, last norm
SEQUENCES, PROMPT, RESPONSE = 16, 24, 8
TOKENS = PROMPT + RESPONSE

WHOLE = {"gpus": "0", "dp": 1, "pp": 1, "tp": 1, "microbatches": 1}
BESIDE = {"gpus": "1", "dp": 1, "pp": 1, "tp": 1, "microbatches": 1}
BOTH = {"gpus": "0-1", "dp": 1, "pp": 1, "tp": 2, "microbatches": 1}
HALVES = {"gpus": "0-1", "dp": 2, "pp": 1, "tp": 1, "microbatches": 1}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


def experiment(pin: dict, *, hardware: str = "h100", memory_gb: float = 80, **workload: object):
    model = {
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn": 128,
        "vocab": 1000,
        "gated_ffn": True,
        "tied_embeddings": False,
    }
    return parse_experiment(
        {
            "algorithm": "grpo",
            "models": {
                "actor": {"config": model},
                "reference": {"same_as": "actor"},
                "reward": {"config": model, "head": "scalar"},
            },
            "workload": {
                "prompts": 8,
                "rollouts_per_prompt": 2,
                "prompt_tokens": PROMPT,
                "response_tokens": RESPONSE,
                **workload,
            },
            "cluster": {"hardware": hardware, "gpus_per_node": 2, "memory_gb": memory_gb},
            "pin": pin,
        }
    )


def structure_of(registry: Registry, one):
    structure = Planner(one, registry).problem().structures[0]
    return structure, structure.plan((0,) * len(structure.candidates))


def pins(**changed: dict) -> dict:
    every = ("actor_generation", "reference_inference", "reward_inference", "actor_training")
    return {name: changed.get(name, WHOLE) for name in every}


def moments_of(structure, plan) -> dict[tuple[str, str, Phase], tuple[float, float]]:
    return {
        (str(segment.gpus), moment.operator, moment.phase): (moment.bytes, moment.first_step_bytes)
        for segment in memory_moments(structure.rpeg, plan, structure.book)
        for moment in segment.moments
    }


def test_every_moment_of_one_gpu(registry) -> None:
    """All on GPU 0, one microbatch of 16 sequences, with the training's weights served as they are."""
    structure, plan = structure_of(registry, experiment(pins()))
    assert structure.rpeg.model("actor").spec.total_parameters == ACTOR
    reward = structure.rpeg.model("reward").spec.total_parameters
    found = moments_of(structure, plan)
    always = 2 * ACTOR + 2 * reward  # frozen weights
    state, first_state = 12 * ACTOR, 4 * ACTOR
    # training: checkpoints of 2 layers, one of them at work: attention 2*64 + 2*64 + 2*32, feed-forward 2*64 + 3*128
    layer = (128 + 128 + 64) + (128 + 384)
    activations = 2 * SEQUENCES * TOKENS * (2 * 64 + layer)
    logits = SEQUENCES * TOKENS * 1000 * (2 + 4) - 2 * SEQUENCES * TOKENS * layer
    passes = 2 * ACTOR + 2 * ACTOR + activations + logits
    update = 2 * ACTOR + 2 * ACTOR
    assert found["0", "actor_training", Phase.PASSES] == (always + state + passes, always + first_state + passes)
    assert found["0", "actor_training", Phase.UPDATE] == (always + state + update, always + state + update)
    # inference: the larger block of a layer, 512 wide, and the logits beyond it
    scored = 2 * SEQUENCES * TOKENS * 512 + SEQUENCES * TOKENS * 1000 * 6 - 2 * SEQUENCES * TOKENS * 512
    assert found["0", "reference_inference", Phase.RUN] == (always + state + scored, always + first_state + scored)
    # generation: the block for the prompts, K and V of every token, a row of logits per sequence within the block
    cache = 2 * SEQUENCES * TOKENS * 2 * 32 * 2
    decoded = 2 * ACTOR + 2 * SEQUENCES * PROMPT * 512 + cache
    assert found["0", "actor_generation", Phase.RUN] == (always + state + decoded, always + first_state + decoded)
    assert {phase for *_, phase in found} == {Phase.RUN, Phase.PASSES, Phase.UPDATE}, "no weights move"


def test_weights_arrive_on_gpus_that_train_in_another_place(registry) -> None:
    """tp=2 trains half of everything that is divided; dp=2 serves it whole: both are there when they are exchanged."""
    structure, plan = structure_of(registry, experiment(pins(actor_training=BOTH, actor_generation=HALVES)))
    found = moments_of(structure, plan)
    shard = structure.book.operators["actor_training"]
    row = structure.book.row(plan["actor_training"], "actor_training")
    trained, state = shard.weights[row], shard.training_state[row]
    assert state == 6 * trained  # 12 bytes to 2
    frozen = 2 * ACTOR + 2 * structure.rpeg.model("reward").spec.total_parameters
    assert found["0", "actor_generation", Phase.ARRIVAL][0] == frozen + state + trained + 2 * ACTOR
    assert found["1", "actor_generation", Phase.ARRIVAL][0] == state + trained + 2 * ACTOR
    assert ("1", "reference_inference", Phase.RUN) not in found


def test_the_largest_moment_is_the_peak_that_the_search_used(registry) -> None:
    for training in (WHOLE, BOTH, HALVES):
        for generation in (WHOLE, BESIDE, BOTH, HALVES):
            one = experiment(pins(actor_training=training, actor_generation=generation))
            structure, plan = structure_of(registry, one)
            prediction = structure.predict(plan)
            segments = memory_moments(structure.rpeg, plan, structure.book)
            peaks = [segment.peak.bytes if segment.peak else 0.0 for segment in segments]
            assert peaks == [segment.peak_bytes for segment in prediction.memory.segments]
            compiled = structure.evaluator.evaluate((0,) * len(structure.candidates))
            assert compiled.peak_ratio == max(peaks) / 72e9
            for segment in segments:
                assert all(moment.first_step_bytes <= moment.bytes for moment in segment.moments)
                for moment in segment.moments:
                    assert sum(item.bytes for item in moment.items) == pytest.approx(moment.bytes)


def test_the_first_step_of_a_second_training_finds_the_state_of_the_first(registry) -> None:
    """PPO: the actor is trained before the critic, so its moments are there when the critic computes."""
    document = experiment(pins()).document() | {"algorithm": "ppo", "pin": {}}
    document["models"]["critic"] = {"spec": document["models"]["reward"]["spec"], "head": "scalar"}
    every = ("actor_generation", "reference_inference", "reward_inference", "critic_inference")
    document["pin"] = dict.fromkeys((*every, "actor_training", "critic_training"), WHOLE)
    structure, plan = structure_of(registry, parse_experiment(document))
    found = moments_of(structure, plan)
    critic = structure.rpeg.model("critic").spec.total_parameters
    order = [op.name for op in structure.rpeg.operators]
    assert order.index("actor_training") < order.index("critic_training")
    later, first = found["0", "actor_training", Phase.PASSES]
    assert later - first == 8 * ACTOR + 8 * critic
    later, first = found["0", "critic_training", Phase.PASSES]
    assert later - first == 8 * critic
    later, first = found["0", "critic_training", Phase.UPDATE]
    assert later == first


# --- reserve and cache


def test_the_reserve_by_communicators(registry) -> None:
    """Everything on GPU 0 of two, but for a training with tp=2: the world and a pair."""
    structure, plan = structure_of(registry, experiment(pins(actor_training=BOTH)))
    reserve = runtime_reserve(structure.rpeg, plan, 2, structure.book.hardware)
    mib = 2**20
    assert reserve.bytes == pytest.approx(8e9)
    assert (reserve.context_bytes, reserve.communicators) == (543 * mib, 2)
    assert reserve.communication_bytes == 2 * 544 * mib
    assert reserve.rest_bytes == pytest.approx(8e9 - (543 + 2 * 544) * mib)


def test_groups_of_one_place_are_shared_and_serving_replicas_do_not_communicate(registry) -> None:
    served = pins(actor_generation=HALVES, reference_inference=BOTH, reward_inference=BOTH)
    structure, plan = structure_of(registry, experiment(served))
    assert runtime_reserve(structure.rpeg, plan, 2, structure.book.hardware).communicators == 2
    trained = pins(actor_generation=HALVES, actor_training=HALVES)
    structure, plan = structure_of(registry, experiment(trained))
    assert runtime_reserve(structure.rpeg, plan, 2, structure.book.hardware).communicators == 2
    one_gpu = runtime_reserve(structure.rpeg, plan, 1, structure.book.hardware)
    assert one_gpu is not None


def test_a_reserve_that_is_too_small_is_said(registry) -> None:
    structure, plan = structure_of(registry, experiment(pins(actor_training=BOTH), memory_gb=16))
    report = MemoryReport.of(structure.predict(plan), plan, structure.book)
    (line,) = [line for line in notes(report) if line.startswith("reserved: ")]
    need = (543 + 2 * 544) * 2**20 - 1.6e9
    assert need > 0
    assert line.endswith(f"plan with {need / 1e9:.1f} GB less memory per GPU (cluster.memory_gb)")


def test_a_cpu_core_has_neither_context_nor_communicators(registry) -> None:
    structure, plan = structure_of(registry, experiment(pins()))
    device = attrs.evolve(structure.book.hardware.device, memory_bandwidth_bytes_per_s=1e10)
    core = attrs.evolve(structure.book.hardware, device=device)
    assert runtime_reserve(structure.rpeg, plan, 2, core) is None


def test_the_pool_of_a_generation_alone_on_its_gpu(registry) -> None:
    """tp=1 on GPU 1: weights, the prefill's block, and 16 sequences of 32 tokens."""
    one = experiment(pins(actor_generation=BESIDE), memory_gb=0.002)
    structure, plan = structure_of(registry, one)
    (pool,) = MemoryReport.of(structure.predict(plan), plan, structure.book).pools
    cache = 2 * SEQUENCES * TOKENS * 2 * 32 * 2
    others = 2 * ACTOR + 2 * SEQUENCES * PROMPT * 512
    assert (pool.sequences, pool.needed_bytes) == (SEQUENCES, cache)
    assert pool.room_bytes == pytest.approx(1.8e6 - others)
    assert pool.fits == int((1.8e6 - others) / (cache / SEQUENCES))
    assert pool.engine_bytes == pytest.approx(ENGINE_FRACTION * 2e6 - others)
    assert pool.engine_sequences == int((1.84e6 - others) / (cache / SEQUENCES))


def test_half_the_bytes_of_a_cache_hold_twice_the_sequences(registry) -> None:
    pools = []
    for width in (2, 1):
        one = experiment(pins(actor_generation=BESIDE), memory_gb=0.004, cache_bytes_per_element=width)
        structure, plan = structure_of(registry, one)
        pools.append(MemoryReport.of(structure.predict(plan), plan, structure.book).pools[0])
    assert pools[0].needed_bytes == 2 * pools[1].needed_bytes
    assert pools[1].fits - 2 * pools[0].fits in (0, 1)


# --- words


@pytest.fixture(scope="module")
def report(registry) -> MemoryReport:
    structure, plan = structure_of(registry, experiment(pins(actor_training=BOTH, actor_generation=HALVES)))
    return MemoryReport.of(structure.predict(plan), plan, structure.book)


def test_the_first_step_is_told_from_later_ones(report) -> None:
    grown = first_step_growth(report.segments)
    line = next(iter(notes(report)))
    assert line == (
        f"step 1 peaks at {grown.first_step_bytes / 1e9:.1f} GB on GPU {grown.gpus}, later steps at "
        f"{grown.peak.bytes / 1e9:.1f} GB: a one-step smoke test proves nothing"
    )


def test_the_table_fits_80_columns_and_cuts_nothing(report) -> None:
    text = draw(moment_table(report).rich(80), width=80)
    assert max(map(len, text.splitlines())) <= 80 + text.count("\x1b[")  # colours take no room
    for words in ("actor_training", "computes gradients", "updates weights", "gets new weights", "step 1", "later"):
        assert words in text
    assert "…" not in text


def test_the_terms_of_a_peak_add_up(report) -> None:
    for line, segment in zip(peak_terms(report), report.peaks, strict=True):
        assert line.startswith(f"GPU {segment.gpus} at its peak: ")
        assert line.count(" GB") == len(segment.items)


def test_the_document_has_every_moment_with_its_terms(report) -> None:
    document = json.loads(json.dumps(report.document(), allow_nan=False))
    assert set(document) == {"moments", "reserve", "kv_pools"}
    keys = {"gpus", "operator", "phase", "bytes", "first_step_bytes", "terms"}
    for moment in document["moments"]:
        assert set(moment) == keys
        assert sum(term["bytes"] for term in moment["terms"]) == pytest.approx(moment["bytes"])
    assert [pool["operator"] for pool in document["kv_pools"]] == ["actor_generation"]
    assert document["reserve"]["rest_bytes"] > 0
