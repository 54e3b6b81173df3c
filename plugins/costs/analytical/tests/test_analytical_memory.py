"""Memory terms of both models against arithmetic, and weights against published parameter counts."""

import attrs
import pytest

from rpeg_core.ir import Role
from rpeg_core.records import MemoryKind
from rpeg_core.spec.models import Head, MoE
from rpeg_core.spec.public_models import public_model
from rpeg_core.spec.workload import LengthQuantile


def test_paper_state_of_the_worst_stage(tiny):
    # one layer of 128 over tp 2, and the embedding or the head of 40, whole on every rank
    batch = tiny.memory(tiny.plain, Role.TRAINING, tiny.layout(2, 2, 2, 4))
    shard = 128 / 2 + 40
    assert tiny.price("paper.optimizer_state", batch) == 12 * shard / 2
    assert tiny.price("paper.weights", batch) == shard * 2
    assert tiny.price("paper.gradients", batch) == shard * 2 / 2


def test_a_third_of_the_optimizer_state_is_there_before_the_first_update(tiny):
    """The FP32 weights of 4 + 4 + 4 bytes; nothing where nothing is trained."""
    for model in ("paper", "analytical"):
        term = tiny.terms[f"{model}.optimizer_state"]
        for layout in (tiny.layout(1, 1, 1), tiny.layout(2, 2, 2, 4)):
            batch = tiny.memory(tiny.plain, Role.TRAINING, layout)
            assert term.first_step(batch)[0] == tiny.price(term.name, batch) / 3
        assert term.first_step(tiny.memory(tiny.plain, Role.INFERENCE, tiny.layout()))[0] == 0


def test_paper_single_stage_holds_embedding_and_head(tiny):
    shard = 2 * 128 / 2 + 40 + 40
    assert tiny.price("paper.weights", tiny.memory(tiny.plain, Role.INFERENCE, tiny.layout(1, 1, 2))) == (2 * shard)
    critic = tiny.memory(tiny.plain.with_head(Head.SCALAR), Role.INFERENCE, tiny.layout(1, 1, 2))
    assert tiny.price("paper.weights", critic) == 2 * (2 * 128 / 2 + 40 + 4)


def test_paper_training_activations(tiny):
    # 9 layers on one stage: c = 3, ceil(9/3) = 3 checkpoints; M_buf = 2 * 4 + 6 * 4 / 2 = 20
    deep = attrs.evolve(tiny.plain, layers=9)
    batch = tiny.memory(deep, Role.TRAINING, tiny.layout(1, 1, 2))
    assert tiny.price("paper.activations", batch) == 2 * 1 * 8 * 8 * (3 * 4 + 3 * 20)
    # pp 2, mb 4: two microbatches of 2 sequences in flight, a layer each
    split = tiny.memory(tiny.plain, Role.TRAINING, tiny.layout(1, 2, 2, 4))
    assert tiny.price("paper.activations", split) == 2 * 2 * 2 * 8 * (1 * 4 + 1 * 20)


def test_paper_inference_activations_include_the_logits(tiny):
    layouts = tiny.layout(1, 1, 2)
    wide = attrs.evolve(tiny.plain, vocab=100)
    assert tiny.price("paper.activations", tiny.memory(wide, Role.INFERENCE, layouts)) == 2 * 8 * 8 * 104
    assert tiny.price("paper.activations", tiny.memory(wide, Role.GENERATION, layouts)) == 2 * 8 * 4 * 104
    critic = wide.with_head(Head.SCALAR)
    assert tiny.price("paper.activations", tiny.memory(critic, Role.INFERENCE, layouts)) == 2 * 8 * 8 * 20
    assert "paper.logits" not in tiny.terms


def test_paper_cache_is_multi_head(tiny):
    batch = tiny.memory(tiny.gated, Role.GENERATION, tiny.layout(2, 2, 2, 2))
    assert tiny.price("paper.kv_cache", batch) == 2 * 2 * (8 / 2) * 8 * (2 / 2) * 4 / 2


def test_weights_on_one_gpu_are_the_published_parameters(tiny):
    for name in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", "google/gemma-2-2b"):
        model = public_model(name)
        batch = tiny.memory(model, Role.INFERENCE, tiny.layout())
        assert tiny.price("analytical.weights", batch) == pytest.approx(2 * model.total_parameters, rel=1e-12)


def test_tensor_parallelism_shards_the_vocabulary_and_replicates_one_kv_head(tiny):
    # attention 48: q and o 32 halve, k and v of the one head (16) do not; norms 8 and 4 do not
    batch = tiny.memory(tiny.gated, Role.INFERENCE, tiny.layout(1, 1, 2))
    layer = 32 / 2 + 16 + 96 / 2 + 8
    assert tiny.price("analytical.weights", batch) == 2 * (2 * layer + 4 + 40 / 2 + 40 / 2)


def test_latent_down_projections_are_replicated(tiny):
    model = public_model("deepseek-ai/DeepSeek-V3")
    one, eight = (
        tiny.price("analytical.weights", tiny.memory(model, Role.INFERENCE, tiny.layout(1, 1, tp))) for tp in (1, 8)
    )
    down = model.layers * 7168 * (1536 + 512 + 64)
    replicated = down + model.small_parameters
    assert eight == pytest.approx(2 * ((one / 2 - replicated) / 8 + replicated))


def test_tied_embeddings_are_copied_only_across_stages(tiny):
    tied = attrs.evolve(tiny.gated, tied_embeddings=True)

    def weights(model, layouts):
        return tiny.price("analytical.weights", tiny.memory(model, Role.INFERENCE, layouts)) / 2

    together, split = tiny.layout(), tiny.layout(1, 2, 1, 2)
    assert weights(tiny.gated, together) - weights(tied, together) == 40
    assert weights(tiny.gated, split) == weights(tied, split) == 144 + 8 + 2 + 40


def test_training_activations_are_korthikantis_less_dropout(tiny):
    """arXiv:2205.05198, table 2: s b h (10 + 24/t) bytes per layer without scores; two masks of one byte."""
    model = attrs.evolve(tiny.plain, layers=1, ffn=16, heads=4, kv_heads=4, head_dim=1)
    for tp in (1, 2, 4):
        batch = tiny.memory(model, Role.TRAINING, tiny.layout(1, 1, tp))
        checkpoint = 64 * 4 * 2
        assert tiny.price("analytical.activations", batch) == pytest.approx(64 * 4 * (10 - 2 + 24 / tp) + checkpoint)


def test_only_one_microbatch_is_recomputed_at_a_time(tiny):
    batch = tiny.memory(tiny.gated, Role.TRAINING, tiny.layout(1, 2, 1, 4))
    # attention 2d + 2 * 4 + 2 * 2 = 20, feed-forward 2d + 3 * 8 = 32; two checkpoints of 4 in flight
    assert tiny.price("analytical.activations", batch) == 2 * 2 * 8 * (2 * 4 + 20 + 32)


def test_inference_holds_the_larger_block(tiny):
    batch = tiny.memory(tiny.gated, Role.INFERENCE, tiny.layout(1, 1, 2))
    assert tiny.price("analytical.activations", batch) == 2 * 64 * (8 + 24 / 2)


def test_logits_in_both_precisions_beyond_the_layer_buffer(tiny):
    wide = attrs.evolve(tiny.gated, vocab=100)
    layouts = tiny.layout(1, 1, 2)
    buffer = 2 * 64 * 20
    batch = tiny.memory(wide, Role.INFERENCE, layouts)
    assert tiny.price("analytical.logits", batch) == 64 * 100 / 2 * (2 + 4) - buffer
    assert tiny.price("analytical.logits", tiny.memory(tiny.gated, Role.INFERENCE, layouts)) == 0.0
    sampled = tiny.memory(wide, Role.GENERATION, layouts)
    assert tiny.price("analytical.logits", sampled) == 8 * 100 * (2 + 4) - 2 * 32 * 20
    critic = tiny.memory(wide.with_head(Head.SCALAR), Role.INFERENCE, layouts)
    assert tiny.price("analytical.logits", critic) == 0.0


def test_cache_has_grouped_heads_and_at_least_one_per_rank(tiny):
    for tp in (1, 2):
        batch = tiny.memory(tiny.gated, Role.GENERATION, tiny.layout(2, 1, tp))
        assert tiny.price("analytical.kv_cache", batch) == (8 / 2) * 8 * 2 * (2 * 2) * 2


def test_cache_peaks_where_alive_sequences_hold_most(tiny):
    lengths = (LengthQuantile(0.75, 3), LengthQuantile(1.0, 4))
    workload = attrs.evolve(tiny.workload, response_lengths=lengths)
    batch = tiny.memory(tiny.gated, Role.GENERATION, tiny.layout(), workload=workload)
    # 8 sequences of 7 tokens, then 2 of 8
    assert tiny.price("analytical.kv_cache", batch) == 8 * 7 * 2 * 4 * 2


def test_shared_prefix_is_cached_once(tiny):
    workload = attrs.evolve(tiny.workload, prompts=2, rollouts_per_prompt=4, shared_prefix=True)
    batch = tiny.memory(tiny.gated, Role.GENERATION, tiny.layout(), workload=workload)
    assert tiny.price("analytical.kv_cache", batch) == (2 * 4 + 8 * 4) * 2 * 4 * 2


def test_all_experts_are_held(tiny):
    moe = attrs.evolve(tiny.gated, moe=MoE(experts=8, active_experts=2, expert_ffn=8))
    batch = tiny.memory(moe, Role.INFERENCE, tiny.layout())
    layer = 48 + 4 * 8 + 8 * 96 + 8
    assert tiny.price("analytical.weights", batch) == 2 * (2 * layer + 4 + 40 + 40)


@pytest.mark.parametrize("model", ["analytical", "paper"])
def test_which_roles_hold_what(tiny, model):
    held = {
        role: {
            name.split(".")[1]
            for name, term in tiny.terms.items()
            if name.startswith(model + ".")
            and term.memory is not None
            and tiny.price(name, tiny.memory(attrs.evolve(tiny.plain, vocab=1000), role, tiny.layout())) > 0
        }
        for role in Role
    }
    logits = {"logits"} if model == "analytical" else set()
    assert held[Role.INFERENCE] == {"weights", "activations"} | logits
    assert held[Role.GENERATION] == {"weights", "activations", "kv_cache"} | logits
    assert held[Role.TRAINING] == {"weights", "activations", "optimizer_state", "gradients"} | logits
    assert all(
        tiny.price(name, tiny.memory(None, Role.INFERENCE, tiny.layout())) == 0.0
        for name, term in tiny.terms.items()
        if term.memory is not None
    )


def test_memory_kinds(tiny):
    kinds = {name.split(".")[1]: term.memory for name, term in tiny.terms.items() if term.memory}
    assert kinds == {
        "optimizer_state": MemoryKind.TRAINING_STATE,
        "weights": MemoryKind.WEIGHTS,
        "gradients": MemoryKind.GRADIENTS,
        "activations": MemoryKind.TRANSIENT,
        "kv_cache": MemoryKind.TRANSIENT,
        "logits": MemoryKind.TRANSIENT,
        "reserve": MemoryKind.TRANSIENT,
    }
