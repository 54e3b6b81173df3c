"""Two trainings in one schedule: against the sum of both, and against schedules drawn by hand."""

import numpy as np
import pytest
from rpeg_plugin_analytical.terms import analytical_terms, paper_terms

from rpeg_core.costing.batches import FusedBatch
from rpeg_core.ir import Role
from rpeg_core.records import MemoryKind, Target
from rpeg_core.spec.models import Head

TERMS = {term.name: term for term in (*analytical_terms(), *paper_terms())}

STAGE_TERMS = {"analytical": ("gemm", "attention", "non_gemm", "tensor_parallel"), "paper": ("gemm",)}
"""What a model counts as the work of a stage."""


def fused(tiny, name, layouts, models):
    """(the term on both models in one operator, on each alone)."""
    term = TERMS[name]
    make = tiny.memory if term.target is Target.MEMORY else tiny.operator
    parts = tuple(make(model, Role.TRAINING, layouts) for model in models)
    return float(term.fused(FusedBatch(parts))[0]), [float(term.function(part)[0]) for part in parts]


@pytest.mark.parametrize("model", ["analytical", "paper"])
@pytest.mark.parametrize(("pipeline", "count"), [(1, 1), (2, 2), (2, 4)])
def test_equal_models_fill_and_drain_once(tiny, model, pipeline, count):
    scalar = tiny.plain.with_head(Head.SCALAR)
    layouts = tiny.layout(1, pipeline, 1, count)
    work = sum(
        float(TERMS[f"{model}.{term}"].function(tiny.operator(scalar, Role.TRAINING, layouts))[0])
        for term in STAGE_TERMS[model]
    )
    bubble, alone = fused(tiny, f"{model}.pipeline_bubble", layouts, [scalar, scalar])
    # The head is small here: slots of work / count seconds, Pp - 1 of them beyond the 2 count of both models.
    assert bubble == pytest.approx((pipeline - 1) * work / count, rel=0.1)
    assert bubble == pytest.approx(alone[0], rel=0.1)  # one fill instead of two


@pytest.mark.parametrize("model", ["analytical", "paper"])
def test_fusion_never_takes_longer_than_one_after_the_other(tiny, model):
    models = [tiny.plain, tiny.plain.with_head(Head.SCALAR)]
    for layouts in (tiny.layout(1, 2, 1, 2), tiny.layout(2, 2, 2, 4), tiny.layout(1, 1, 2, 1)):
        for term in ("pipeline_bubble", "pipeline_parallel"):
            together, alone = fused(tiny, f"{model}.{term}", layouts, models)
            assert 0.0 <= together <= sum(alone) * (1 + 1e-12)


@pytest.mark.parametrize("model", ["analytical", "paper"])
def test_activations_are_between_those_of_the_larger_model_and_of_both(tiny, model):
    models = [tiny.plain, tiny.plain.with_head(Head.SCALAR)]
    together, alone = fused(tiny, f"{model}.activations", tiny.layout(1, 2, 1, 2), models)
    # Two stages hold two microbatches, of equal models one of each: as much as two of one.
    assert together == pytest.approx(max(alone))


def test_all_other_terms_are_sums():
    summed = {name.partition(".")[2] for name, term in TERMS.items() if term.fused is None}
    assert summed >= {"gemm", "tensor_parallel", "data_parallel", "optimizer", "weights", "gradients"}
    kept = [term for term in TERMS.values() if term.memory in (MemoryKind.TRAINING_STATE, MemoryKind.WEIGHTS)]
    assert all(term.fused is None for term in kept)
    assert np.all([term.target is not Target.TRANSFER for term in TERMS.values() if term.fused])
