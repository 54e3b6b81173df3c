"""The axes of a plan in the plan's own subset: what each divides, by arithmetic on the tiny models."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from rpeg_core.ir import Role
from rpeg_core.planning.axes import AXES
from rpeg_core.spec.execution import Execution, Precision, Recompute, Sharding
from rpeg_core.spec.models import Head, ModelSpec, MoE

# GPT with d_ff = 4 d, without a head, so that only layers count
GPT = ModelSpec(
    name="gpt",
    family="gpt",
    layers=4,
    hidden=8,
    heads=2,
    kv_heads=2,
    head_dim=4,
    ffn=32,
    gated_ffn=False,
    vocab=16,
    tied_embeddings=True,
    head=Head.SCALAR,
)
SPARSE = attrs.evolve(GPT, moe=MoE(experts=4, active_experts=1, expert_ffn=32))
EXPERTS = 4 * 4 * 2 * 8 * 32  # layers, experts, projections, d, d_ff
TOKENS = 8 * 8  # sequences x length of the tiny workload
NONE = Execution(recompute=Recompute.NONE)


def held(tiny, term, execution, layouts=None, model=GPT, role=Role.TRAINING):
    batch = tiny.memory(model, role, tiny.layout() if layouts is None else layouts)
    return tiny.price(f"analytical.{term}", attrs.evolve(batch, execution=execution))


def with_context(layouts, context):
    return attrs.evolve(layouts, context=np.array([context]), gpus=layouts.gpus * context)


def test_without_recomputation_every_layer_keeps_what_korthikanti_counts(tiny):
    """34 s b h (arXiv:2205.05198, equation 1, without 5 a s / h) less the masks, 2 s b h; and one layer at work."""
    layer = (34 - 2) * TOKENS * 8
    assert held(tiny, "activations", NONE) == (4 + 1) * layer
    # fused attention keeps no scores, so that recomputing it frees nothing
    assert held(tiny, "activations", attrs.evolve(NONE, recompute=Recompute.SELECTIVE)) == (4 + 1) * layer
    assert held(tiny, "activations", attrs.evolve(NONE, recompute=Recompute.OPERATOR)) == (4 / 2 + 1) * layer


def test_full_recomputation_is_the_papers(tiny):
    """Every second layer's output, 2 bytes each, and two layers at work (D-I a)."""
    layer = (34 - 2) * TOKENS * 8
    assert held(tiny, "activations", Execution()) == 2 * 2 * TOKENS * 8 + 2 * layer


def test_a_pipeline_keeps_the_microbatches_in_flight(tiny):
    layer = 32 * TOKENS / 4 * 8
    assert held(tiny, "activations", NONE, tiny.layout(1, 2, 1, 4)) == 2 * 2 * layer + layer


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize("role", [Role.TRAINING, Role.INFERENCE])
def test_context_parallelism_divides_tokens_and_not_weights(tiny, recompute, role):
    alone = Execution(recompute=recompute)
    halved = attrs.evolve(alone, context=2)
    layouts = with_context(tiny.layout(), 2)
    lm = GPT.with_head(Head.LM)
    for term in ("activations", "logits"):
        assert held(tiny, term, halved, layouts, lm, role) == held(tiny, term, alone, None, lm, role) / 2
    assert held(tiny, "weights", halved, layouts, role=role) == held(tiny, "weights", alone, role=role)


def test_context_ranks_share_the_optimizer_as_data_parallel_ones_do(tiny):
    layouts = with_context(tiny.layout(2), 3)
    for term in ("optimizer_state", "gradients"):
        assert held(tiny, term, Execution(context=3), layouts) == pytest.approx(held(tiny, term, Execution()) / 6)


def test_sequence_parallelism_divides_what_tensor_parallelism_leaves_whole(tiny):
    """10 s b h + 24 s b h / t without, (34 - 2) s b h / t with (section 4.2.1); the kept inputs of layers too."""
    layouts = tiny.layout(1, 1, 2)
    assert held(tiny, "activations", NONE, layouts) == 5 * (8 + 24 / 2) * TOKENS * 8
    divided = attrs.evolve(NONE, sequence_parallel=True)
    assert held(tiny, "activations", divided, layouts) == held(tiny, "activations", NONE) / 2
    full = Execution(sequence_parallel=True)
    assert held(tiny, "activations", full, layouts) == held(tiny, "activations", Execution()) / 2


def test_expert_ranks_hold_other_experts(tiny):
    layouts = tiny.layout(4)
    for role in (Role.TRAINING, Role.GENERATION):
        whole, spread = (held(tiny, "weights", Execution(expert=e), layouts, SPARSE, role) for e in (1, 4))
        assert whole - spread == 2 * EXPERTS * 3 / 4


@pytest.mark.parametrize("framework", ["", "megatron-core"])
@pytest.mark.parametrize("degrees", [(4, 1, 1, 4), (2, 2, 1, 4), (2, 1, 2, 2), (8, 1, 1, 2)])
def test_the_state_of_the_experts_is_on_some_gpu_once(tiny, framework, degrees):
    """However the experts are spread, all GPUs together hold 12 bytes of each of their parameters."""
    data, tensor, context, expert = degrees
    layouts = with_context(tiny.layout(data, 1, tensor), context)
    gpus = data * tensor * context
    states = []
    for ranks in (1, expert):
        execution = Execution(framework=framework, context=context, expert=ranks)
        of_all, of_dense = (held(tiny, "optimizer_state", execution, layouts, model) for model in (SPARSE, GPT))
        dense = 4 * 2 * 8 * 32  # the feed-forward networks that experts take the place of
        router = 4 * 8 * 4
        states.append(of_all - of_dense + 12 * (dense - router) / gpus)
    assert states[0] == pytest.approx(states[1])
    assert states[1] * gpus == pytest.approx(12 * EXPERTS)


def test_a_fully_sharded_mixture_holds_each_expert_once(tiny):
    layouts = tiny.layout(4)
    common = {"framework": "prime-rl", "sharding": Sharding.FULL}
    alone, spread = (held(tiny, "optimizer_state", Execution(**common, expert=e), layouts, SPARSE) for e in (1, 4))
    assert alone == pytest.approx(spread)


def test_served_layers_are_kept_in_their_precision(tiny):
    layers = 4 * (4 * 8 * 8 + 2 * 8 * 32)
    bf16, fp8 = (
        held(tiny, "weights", Execution(precision=p), role=Role.GENERATION) for p in (Precision.BF16, Precision.FP8)
    )
    assert bf16 - fp8 == layers
    nvfp4 = held(tiny, "weights", Execution(precision=Precision.NVFP4), role=Role.INFERENCE)
    assert bf16 - nvfp4 == layers * (2 - 0.5 - 1 / 16)
    assert held(tiny, "weights", Execution(precision=Precision.FP8)) == bf16  # a training keeps 16 bits


def test_messages_between_nodes_are_counted_by_whole_stages(tiny):
    """Four stages of one GPU fill a node: no boundary leaves it. Of two GPUs (Pc = 2) they fill two: one of three does.
    Of four GPUs each is a node. P2P takes 2 + M/20 inside and 4 + M/8 between nodes."""
    for context, between in ((1, 0), (2, 1), (4, 3)):
        layouts = with_context(tiny.layout(1, 4, 1, 4), context)
        batch = tiny.operator(GPT, Role.TRAINING, attrs.evolve(layouts, stage_tier=np.array([int(context > 1)])))
        message = TOKENS / 4 * 8 * 2 / context
        expected = ((3 - between) * (2 + message / 20) + between * (4 + message / 8)) / 3
        found = tiny.price("analytical.pipeline_parallel", attrs.evolve(batch, execution=Execution(context=context)))
        assert found == pytest.approx((4 + 2 * 4 - 3) * expected)


def test_gradients_use_the_adapters_of_context_ranks_too(tiny):
    """A replica of two nodes, 4 stages of Pc = 2: of each stage two ranks are in a node, so two adapters of 5 bytes/s,
    which is the 10 of the links inside it."""
    layouts = attrs.evolve(with_context(tiny.layout(2, 4, 1, 4), 2), data_tier=np.array([1]))
    batch = attrs.evolve(tiny.operator(GPT, Role.TRAINING, layouts), execution=Execution(context=2))
    assert batch.dp_links.bandwidth_bytes_per_s == 10.0
    alone = attrs.evolve(tiny.operator(GPT, Role.TRAINING, tiny.layout(2, 4, 1, 4)), execution=Execution())
    assert alone.dp_links.bandwidth_bytes_per_s == 5.0


def test_experts_of_other_replicas_are_beyond_the_stages_between(tiny):
    """dp 4 pp 2 on two nodes, ep 4: a group has a rank in each replica, so that it spans both nodes. With pp 1 its four
    ranks are one node."""
    flat = tiny.layout(4)
    deep = tiny.layout(4, 2, 1, 2)
    batches = [tiny.operator(SPARSE, Role.INFERENCE, layouts) for layouts in (flat, deep)]
    near, far = (
        tiny.price("analytical.expert_parallel", attrs.evolve(batch, execution=Execution(expert=4)))
        for batch in batches
    )
    # two AllToAlls for each of 4 layers, log2(4) latencies of 1; a token is 16 bytes, 3 of 4 times elsewhere
    tokens = TOKENS / 4
    assert near == pytest.approx(2 * 4 * (2 * 1.0 + tokens * 16 * 3 / 4 / 10.0))
    # two microbatches of half the tokens on half the layers; two nodes: half of the copies cross, at 5 bytes/s; and of
    # these, inside the nodes, 3 of 4 at 10: the longer counts
    one = tokens / 2 * 16
    assert far == pytest.approx(2 * 2 * 2 * (2 * 3.0 + max(one / 2 / 5.0, one * 3 / 4 / 10.0)))


def test_every_term_of_the_model_says_that_it_knows_the_axes(tiny):
    for name, term in tiny.terms.items():
        if term.target.value != "transfer":
            assert term.axes == (frozenset() if name.startswith("paper.") else frozenset(AXES)), name
