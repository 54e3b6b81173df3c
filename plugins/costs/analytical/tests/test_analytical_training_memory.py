"""What frameworks hold in training, against published formulas and arithmetic on the tiny models."""

import attrs
import pytest

from rpeg_core.ir import Role
from rpeg_core.spec.execution import Execution, Precision, Recompute, Sharding
from rpeg_core.spec.models import Head, ModelSpec, MoE
from rpeg_core.spec.workload import Workload

MEGATRON = Execution(framework="megatron-core", recompute=Recompute.NONE)
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
TOKENS = 8 * 8  # sequences x length of the tiny workload


def held(tiny, term, execution, layouts=None, model=GPT, **changes):
    batch = tiny.memory(model, Role.TRAINING, tiny.layout() if layouts is None else layouts)
    return tiny.price(f"analytical.{term}", attrs.evolve(batch, execution=execution, **changes))


def test_a_layer_keeps_what_korthikanti_counts_less_scores_and_masks(tiny):
    """34 s b h (arXiv:2205.05198, equation 1, without 5 a s / h) less the masks, 2 s b h; and one layer at work."""
    expected = (34 - 2) * TOKENS * 8
    assert held(tiny, "activations", MEGATRON) == (4 + 1) * expected


def test_sequence_parallelism_divides_all_of_it(tiny):
    alone = held(tiny, "activations", MEGATRON)
    whole = held(tiny, "activations", MEGATRON, tiny.layout(1, 1, 2))
    divided = held(tiny, "activations", attrs.evolve(MEGATRON, sequence_parallel=True), tiny.layout(1, 1, 2))
    # 10 s b h + 24 s b h / t without, of which the masks are two (section 4.2.1)
    assert whole == 5 * (8 + 24 / 2) * TOKENS * 8
    assert divided == alone / 2


def test_full_recomputation_keeps_the_inputs_of_layers(tiny):
    full = attrs.evolve(MEGATRON, recompute=Recompute.FULL)
    assert held(tiny, "activations", full) == (4 * 2 + 32) * TOKENS * 8
    assert held(tiny, "activations", attrs.evolve(full, offloaded=True)) == 32 * TOKENS * 8


def test_a_pipeline_holds_its_microbatches_and_more_with_chunks(tiny):
    layouts = tiny.layout(1, 2, 1, 4)
    layer = 32 * TOKENS / 4 * 8
    assert held(tiny, "activations", MEGATRON, layouts) == 2 * 2 * layer + layer
    # (1 + (p - 1) / (p m)) times as many: section 4.2.3
    chunks = attrs.evolve(MEGATRON, virtual_stages=2)
    assert held(tiny, "activations", chunks, layouts) == 2 * (1 + 1 / 4) * 2 * layer + layer


def test_mixed_precision_states_are_sixteen_bytes_and_the_gradient_buffer(tiny):
    parameters = GPT.total_parameters
    layouts = tiny.layout(2)
    assert held(tiny, "weights", MEGATRON, layouts) == 2 * parameters
    assert held(tiny, "gradients", MEGATRON, layouts) == 4 * parameters
    assert held(tiny, "optimizer_state", MEGATRON, layouts) == 12 * parameters / 2
    alone = attrs.evolve(MEGATRON, sharding=Sharding.NONE)
    assert held(tiny, "optimizer_state", alone, layouts) == 12 * parameters


def test_fully_sharded_models_hold_a_part_and_the_layers_at_work(tiny):
    sharded = Execution(framework="torchtitan", sharding=Sharding.FULL)
    parameters, layouts = GPT.total_parameters, tiny.layout(4)
    gathered = 2 * 2 * GPT.layer_parameters
    assert held(tiny, "weights", sharded, layouts) == parameters + gathered  # FP32, a quarter each
    assert held(tiny, "gradients", sharded, layouts) == parameters
    assert held(tiny, "optimizer_state", sharded, layouts) == 2 * parameters
    # in a pipeline a stage keeps its gathered weights and whole gradients
    stages = tiny.layout(4, 2, 1, 2)
    assert held(tiny, "gradients", sharded, stages) > held(tiny, "gradients", sharded, layouts)


def test_short_moments_are_half_of_the_moments_and_of_the_gradients(tiny):
    short = attrs.evolve(MEGATRON, short_moments=True)
    assert held(tiny, "optimizer_state", short) == held(tiny, "optimizer_state", MEGATRON) * (4 + 2 + 2) / (4 + 4 + 4)
    assert held(tiny, "gradients", short) == held(tiny, "gradients", MEGATRON) / 2


def test_adapters_train_no_base(tiny):
    adapters = attrs.evolve(MEGATRON, frozen_base=True)
    assert held(tiny, "gradients", adapters) == held(tiny, "optimizer_state", adapters) == 0.0


def test_expert_parallelism_spreads_the_experts(tiny):
    moe = attrs.evolve(GPT, moe=MoE(experts=4, active_experts=1, expert_ffn=32))
    experts = 4 * 4 * 2 * 8 * 32
    layouts = tiny.layout(4)
    whole, spread = (held(tiny, "weights", attrs.evolve(MEGATRON, expert=pe), layouts, model=moe) for pe in (1, 4))
    assert whole - spread == 2 * experts * 3 / 4


def test_eight_bit_recipes_keep_smaller_inputs_and_gradients(tiny):
    fp8 = attrs.evolve(MEGATRON, precision=Precision.FP8)
    assert held(tiny, "gradients", fp8) == held(tiny, "gradients", MEGATRON) / 2
    # one byte less for each element of the four products' inputs: d, d_attn, d and d_ff
    saved = 5 * (8 + 8 + 8 + 32) * TOKENS
    assert held(tiny, "activations", MEGATRON) - held(tiny, "activations", fp8) == saved


def test_logits_are_those_of_a_microbatch_unless_the_loss_works_in_chunks(tiny):
    lm = GPT.with_head(Head.LM)
    assert held(tiny, "logits", MEGATRON, model=lm) == 6 * TOKENS * 16
    assert held(tiny, "logits", attrs.evolve(MEGATRON, chunked_loss=True), model=lm) == 0.0


def test_context_parallelism_divides_activations(tiny):
    assert held(tiny, "activations", attrs.evolve(MEGATRON, context=2)) == held(tiny, "activations", MEGATRON) / 2


def test_the_reserve_is_a_share_of_everything(tiny):
    eager = Execution(framework="prime-rl", sharding=Sharding.FULL)
    names = ("weights", "gradients", "optimizer_state", "activations", "logits")
    tensors = sum(held(tiny, name, eager) for name in names)
    assert held(tiny, "reserve", eager) == pytest.approx(0.12 * tensors)
    assert held(tiny, "reserve", MEGATRON) == 0.0


def test_the_plans_own_subset_is_as_before(tiny):
    batch = tiny.memory(
        tiny.gated, Role.TRAINING, tiny.layout(2), workload=Workload(prompts=8, prompt_tokens=4, response_tokens=4)
    )
    shard = tiny.gated.total_parameters
    assert tiny.price("analytical.gradients", batch) == 2 * shard / 2
    assert tiny.price("analytical.reserve", batch) == 0.0
