"""What must hold for every legal layout of real models, and for the models as a whole."""

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rpeg_plugin_analytical import rpeg_cost_terms

from rpeg_core.costing.batches import MemoryBatch, OperatorBatch
from rpeg_core.costing.book import CostBook
from rpeg_core.ir import Role, RpegBuilder
from rpeg_core.planning.axes import Axes
from rpeg_core.planning.candidates import legal_candidates
from rpeg_core.records import Target
from rpeg_core.spec.execution import Precision, Recompute
from rpeg_core.spec.machine import (
    AlphaBeta,
    Device,
    DeviceSpace,
    GemmEfficiency,
    HardwareProfile,
    LinkTier,
)
from rpeg_core.spec.models import Head
from rpeg_core.spec.public_models import public_model
from rpeg_core.spec.workload import LengthQuantile, Workload
from rpeg_core.testing.toys import active

# Round numbers near an H100 in a DGX: 800 TFLOP/s, 2.8 TB/s, NVLink 370 GB/s, one 400 Gb/s adapter per GPU.
HARDWARE = HardwareProfile(
    name="h100-like",
    summary="made up",
    gpus_per_node=8,
    device=Device(memory_bytes=80 * 2**30, memory_bandwidth_bytes_per_s=2.8e12, peak_flops_per_s=8.0e14),
    tiers=(
        LinkTier(collective=AlphaBeta(1.3e-6, 3.7e11), p2p=AlphaBeta(8e-6, 2.4e11)),
        LinkTier(collective=AlphaBeta(3.4e-6, 4.8e10), p2p=AlphaBeta(1e-5, 4.8e10)),
        LinkTier(collective=AlphaBeta(3.6e-6, 4.8e10), p2p=AlphaBeta(1e-5, 4.8e10)),
    ),
    efficiency=GemmEfficiency(gamma_m_rows=130.0, gamma_k_columns=200.0),
    non_gemm_layer_s=1.5e-4,
    non_gemm_reference_batch=8,
)
MODELS = (
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-3.1-8B",
    "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen1.5-MoE-A2.7B",
    "deepseek-ai/DeepSeek-V3",
    "google/gemma-2-2b",
    "openai-community/gpt2",
)
SKEWED = (LengthQuantile(0.5, 64), LengthQuantile(0.85, 256), LengthQuantile(1.0, 512))


def graph_of(model):
    b = RpegBuilder("step")
    b.model("actor", model, trainable=True, staleness=0)
    b.model("critic", model.with_head(Head.SCALAR), trainable=False)
    completions = b.data("completions", elements=1000, bytes_per_element=2)
    values = b.data("values", elements=1000, bytes_per_element=2)
    b.generation("generation", "actor", reads=[], writes=[completions])
    b.inference("values", "critic", reads=[completions], writes=[values])
    b.training("training", "actor", reads=[values])
    b.connect("generation", completions, "values")
    b.connect("values", values, "training")
    b.publish("training", "generation")
    return b.build()


def book_of(model, workload, terms, machine, axes=None, frameworks=None):
    graph = graph_of(model)
    return CostBook(
        rpeg=graph,
        machine=machine,
        hardware=HARDWARE,
        workload=workload,
        layouts={
            operator.name: legal_candidates(
                operator.name,
                machine,
                workload,
                graph.model_of(operator.name).spec,
                axes=(axes or {}).get(operator.name, Axes()),
            ).layouts
            for operator in graph.operators
        },
        terms=[active(term) for term in terms],
        frameworks=frameworks,
    )


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "mistralai/Mixtral-8x7B-v0.1"])
@pytest.mark.parametrize("framework", ["", "torchtitan"])
def test_every_combination_of_the_axes_has_finite_costs(name, framework):
    """And more of an axis never means more of what it divides."""
    workload = Workload(prompts=16, rollouts_per_prompt=8, prompt_tokens=128, response_tokens=512)
    model, machine = public_model(name), DeviceSpace(racks=2, nodes_per_rack=2, gpus_per_node=8)
    expert = (1, 8) if model.moe is not None else (1,)
    whole = Axes(
        context=(1, 2, 16),
        expert=expert,
        sequence_parallel=(False, True),
        recompute=tuple(Recompute),
        precision=(Precision.BF16, Precision.FP8, Precision.NVFP4),
    )
    axes = {
        "training": whole,
        "values": attrs.evolve(whole, recompute=(None,)),
        "generation": Axes(expert=expert, precision=whole.precision),
    }
    terms = [term for term in rpeg_cost_terms() if term.name.startswith("analytical.")]
    book = book_of(model, workload, terms, machine, axes, {"training": framework})
    costs = book.operators["training"]
    rows = {
        (costs.layouts.layout(i), int(costs.layouts.microbatches[i]), costs.layouts.mode_of(i)): i
        for i in range(len(costs.layouts))
    }
    assert len(rows) == len(costs.layouts) > 1000
    for (layout, microbatches, mode), row in rows.items():
        without = rows.get((layout, microbatches, attrs.evolve(mode, sequence_parallel=False)))
        assert costs.transient[row] <= costs.transient[without] * (1 + 1e-12)
        alone = rows.get((attrs.evolve(layout, context=1), microbatches, mode))
        if alone is not None:
            assert costs.isolated[row] <= costs.isolated[alone] * (1 + 1e-12)
        together = rows.get((attrs.evolve(layout, expert=1), microbatches, mode))
        if together is not None and layout.expert >= layout.tensor:
            assert costs.weights[row] <= costs.weights[together] * (1 + 1e-12)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cost_model", ["analytical", "paper"])
@pytest.mark.parametrize("lengths", [(), SKEWED], ids=["one-phase", "three-phases"])
def test_every_legal_layout_has_finite_costs(name, cost_model, lengths):
    """The cost book itself refuses negative, infinite and undefined values."""
    workload = Workload(
        prompts=64,
        rollouts_per_prompt=4,
        prompt_tokens=128,
        response_tokens=512,
        response_lengths=lengths,
    )
    terms = [term for term in rpeg_cost_terms() if term.name.startswith(f"{cost_model}.")]
    machine = DeviceSpace(racks=2, nodes_per_rack=2, gpus_per_node=8)
    book = book_of(public_model(name), workload, terms, machine)
    for costs in book.operators.values():
        layouts, names = costs.layouts, [term.name.split(".")[1] for term in costs.whole.terms]
        values = dict(zip(names, costs.whole.values, strict=True))
        assert np.all(costs.whole.total > 0)
        assert np.all(values["gemm"] > 0)
        assert np.all(costs.weights > 0)
        assert np.all((values["tensor_parallel"] > 0) == (layouts.tensor > 1))
        assert np.all((values["pipeline_bubble"] > 0) == (layouts.pipeline > 1))
        assert np.all((values["pipeline_parallel"] > 0) == (layouts.pipeline > 1))
        if cost_model == "paper":
            assert np.all(values["non_gemm"][layouts.tensor == 1] == 0)
        assert np.all(values["data_parallel"][layouts.data == 1] == 0)
    training = book.operators["training"]
    assert np.all(training.training_state > 0)
    assert np.all(book.operators["generation"].training_state == 0)


@pytest.mark.parametrize("cost_model", ["analytical", "paper"])
def test_more_of_anything_is_never_faster(cost_model, tiny):
    """Doubling prompts, prompt length or response length at a fixed layout, for all roles and terms."""
    base = Workload(prompts=64, prompt_tokens=128, response_tokens=512)
    model, layouts = public_model("meta-llama/Llama-3.1-8B"), tiny.layout(2, 2, 2, 4, gpus_per_node=8)
    for role in Role:
        for name, term in tiny.terms.items():
            if term.target is Target.TRANSFER or not name.startswith(cost_model):
                continue
            make = tiny.operator if term.target is Target.OPERATOR else tiny.memory
            before = tiny.price(name, make(model, role, layouts, workload=base))
            for change in ({"prompts": 128}, {"prompt_tokens": 256}, {"response_tokens": 1024}):
                workload = attrs.evolve(base, **change)
                after = tiny.price(name, make(model, role, layouts, workload=workload))
                assert after >= before * (1 - 1e-12), (name, role, change)


@given(
    data=st.sampled_from([1, 2, 8]),
    pipeline=st.sampled_from([1, 2, 4]),
    tensor=st.sampled_from([1, 2, 4, 8]),
    deeper=st.integers(2, 4),
)
def test_a_deeper_model_needs_more_of_everything(tiny, data, pipeline, tensor, deeper):
    model = attrs.evolve(public_model("meta-llama/Llama-3.1-8B"), layers=8)
    deep = attrs.evolve(model, layers=8 * deeper)
    layouts = tiny.layout(data, pipeline, tensor, 4 if pipeline > 1 else 1, gpus_per_node=8)
    for role in Role:
        for cost_model in ("analytical", "paper"):
            for name, make in (
                ("gemm", tiny.operator),
                ("tensor_parallel", tiny.operator),
                ("weights", tiny.memory),
                ("activations", tiny.memory),
            ):
                term = f"{cost_model}.{name}"
                assert tiny.price(term, make(deep, role, layouts)) >= tiny.price(term, make(model, role, layouts))


def test_a_batch_of_layouts_is_each_layout_alone(tiny):
    workload = Workload(prompts=64, prompt_tokens=128, response_tokens=512, response_lengths=SKEWED)
    model = public_model("mistralai/Mixtral-8x7B-v0.1")
    machine = DeviceSpace(racks=1, nodes_per_rack=2, gpus_per_node=8)
    layouts = legal_candidates("generation", machine, workload, model).layouts
    assert len(layouts) > 20

    def pick(index):
        return layouts.take(np.array([index]))

    for role in Role:
        generates = role is Role.GENERATION
        common = {
            "role": role,
            "model": model,
            "seconds_per_sample": None,
            "workload": workload,
            "machine": machine,
            "hardware": HARDWARE,
            "settings": None,
        }
        operator = OperatorBatch(
            **common,
            layouts=layouts,
            sequences=64,
            prefill=generates,
            phases=workload.phases if generates else (),
        )
        memory = MemoryBatch(**common, layouts=layouts, trainable=True)
        for name, term in tiny.terms.items():
            if term.target is Target.TRANSFER:
                continue
            batch = operator if term.target is Target.OPERATOR else memory
            whole = term.function(batch)
            for index in (0, len(layouts) // 2, len(layouts) - 1):
                assert tiny.price(name, attrs.evolve(batch, layouts=pick(index))) == whole[index]


def test_both_models_offer_the_terms_users_select():
    names = [term.name for term in rpeg_cost_terms()]
    assert len(names) == len(set(names))
    time = {"gemm", "pipeline_bubble", "tensor_parallel", "pipeline_parallel", "data_parallel", "non_gemm"}
    time |= {"optimizer", "function_reward", "communicate", "reshard"}
    memory = {"optimizer_state", "weights", "gradients", "activations", "kv_cache"}
    expected = {f"paper.{name}" for name in time | memory}
    effects = {"attention", "context_parallel", "expert_parallel", "stragglers", "step_overhead", "loop_overhead"}
    expected |= {f"analytical.{name}" for name in time | effects | memory | {"logits", "reserve"}}
    assert set(names) == expected
