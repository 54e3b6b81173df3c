"""Well-formedness: each rule by a graph that breaks it and nothing else, and all of them at once."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpeg_core.errors import GraphError
from rpeg_core.ir import (
    Container,
    ContainerKind,
    DataEdge,
    Operator,
    PublicationEdge,
    Role,
    require_well_formed,
    violations,
)
from rpeg_core.testing.strategies import rpegs
from rpeg_core.testing.toys import toy_actor_critic, toy_mini

MINI = toy_mini(tau=1)  # actor_generation -completions-> actor_training, weights published back
GENERATION, TRAINING = MINI.operators
PROMPTS, COMPLETIONS = MINI.container("prompts"), MINI.container("completions")


def with_operators(*operators, **changes):
    return attrs.evolve(MINI, operators=operators, **changes)


def with_container(name, **changes):
    containers = tuple(attrs.evolve(c, **changes) if c.name == name else c for c in MINI.containers)
    return attrs.evolve(MINI, containers=containers)


def with_model(**changes):
    return attrs.evolve(MINI, models=(attrs.evolve(MINI.models[0], **changes),))


BROKEN = {
    "operator twice": (
        with_operators(GENERATION, TRAINING, TRAINING),
        "W0: operator 'actor_training' is declared 2 times",
    ),
    "container twice": (
        attrs.evolve(MINI, containers=(*MINI.containers, PROMPTS)),
        "W0: container 'prompts' is declared 2 times",
    ),
    "model twice": (
        attrs.evolve(MINI, models=MINI.models * 2),
        "W0: model 'actor' is declared 2 times",
    ),
    "weights of an unknown model": (
        with_container("W_actor", model="aktor"),
        "W0: weights container 'W_actor' belongs to unknown model 'aktor'",
    ),
    "negative size": (
        with_container("prompts", elements=-1),
        "W0: container 'prompts' has a negative size",
    ),
    "unknown model": (
        with_operators(attrs.evolve(GENERATION, model="aktor"), TRAINING),
        "W0: operator 'actor_generation' invokes unknown model 'aktor'",
    ),
    "function that generates": (
        with_operators(attrs.evolve(GENERATION, model=None, seconds_per_sample=1.0), TRAINING),
        "W0: operator 'actor_generation' has no model, so its role must be inference",
    ),
    "function without a cost": (
        with_operators(attrs.evolve(GENERATION, model=None, role=Role.INFERENCE), TRAINING),
        "W0: operator 'actor_generation' must have a model or seconds_per_sample, and not both",
    ),
    "model with a stated cost": (
        with_operators(attrs.evolve(GENERATION, seconds_per_sample=1.0), TRAINING),
        "W0: operator 'actor_generation' must have a model or seconds_per_sample, and not both",
    ),
    "name with a space": (
        with_operators(
            attrs.evolve(GENERATION, name="actor generation"), TRAINING, data_edges=(), publication_edges=()
        ),
        "W0: operator name 'actor generation' must be letters, digits, '_', '-' or '.'",
    ),
    "read before it is written": (
        attrs.evolve(MINI, data_edges=()),
        "W3: 'actor_training' reads container 'completions', but no data edges lead to it from 'actor_generation'",
        "W2: 'actor_generation' serves 'actor' but no data edges lead from it to 'actor_training'",
    ),
    "served without publication": (
        attrs.evolve(MINI, publication_edges=()),
        "W2: 'actor_training' does not publish its weights to 'actor_generation'",
    ),
    "unknown container read": (
        with_operators(GENERATION, attrs.evolve(TRAINING, inputs=TRAINING.inputs | {"scores"})),
        "W0: operator 'actor_training' names unknown container 'scores'",
    ),
    "edge from an unknown operator": (
        attrs.evolve(MINI, data_edges=(DataEdge("generation", "actor_training", "completions"),)),
        "W0: edge generation -completions-> actor_training names unknown operator 'generation'",
    ),
    "edge with an unknown container": (
        attrs.evolve(MINI, publication_edges=(PublicationEdge("actor_training", "actor_generation", "W"),)),
        "W0: edge actor_training -W-> actor_generation names unknown container 'W'",
    ),
    "unknown graph input": (
        attrs.evolve(MINI, inputs=MINI.inputs | {"questions"}),
        "W0: the boundary names unknown container 'questions'",
    ),
    "negative staleness": (
        with_model(staleness=-1),
        "W0: model 'actor' has staleness -1; a frozen model has 0",
    ),
    "stale frozen model": (
        with_model(trainable=False),
        "W0: model 'actor' has staleness 1; a frozen model has 0",
    ),
    "source does not write": (
        attrs.evolve(MINI, data_edges=(*MINI.data_edges, DataEdge("actor_training", "actor_generation", "prompts"))),
        "W1: edge actor_training -prompts-> actor_generation: 'actor_training' does not write container 'prompts'",
        "W4: data edges form a cycle: actor_generation -> actor_training -> actor_generation",
    ),
    "target does not read": (
        with_operators(GENERATION, attrs.evolve(TRAINING, inputs=frozenset({"W_actor", "prompts"}))),
        "W1: edge actor_generation -completions-> actor_training: 'actor_training' does not read container "
        "'completions'",
        "W3: container 'completions' is written but nothing reads it and it is no graph output",
    ),
    "data edge with weights": (
        with_operators(
            attrs.evolve(GENERATION, outputs=frozenset({"completions", "W_actor"})),
            TRAINING,
            data_edges=(*MINI.data_edges, DataEdge("actor_generation", "actor_training", "W_actor")),
        ),
        "W1: data edge actor_generation -W_actor-> actor_training carries weights; only publication edges do",
    ),
    "publication by a serving operator": (
        with_operators(
            attrs.evolve(GENERATION, outputs=frozenset({"completions", "W_actor"})),
            TRAINING,
            publication_edges=(PublicationEdge("actor_generation", "actor_training", "W_actor"),),
        ),
        "W2: publication edge actor_generation -W_actor-> actor_training: 'actor_generation' is not a "
        "training operator",
        "W2: 'actor_training' does not publish its weights to 'actor_generation'",
    ),
    "publication of data": (
        with_operators(
            GENERATION,
            attrs.evolve(TRAINING, outputs=frozenset({"W_actor", "prompts"})),
            publication_edges=(PublicationEdge("actor_training", "actor_generation", "prompts"),),
        ),
        "W2: publication edge actor_training -prompts-> actor_generation: container 'prompts' does not hold "
        "the weights of model 'actor'",
        "W3: 'actor_generation' reads container 'prompts', but no data edges lead to it from 'actor_training'",
    ),
    "training that writes no weights": (
        with_operators(
            GENERATION,
            attrs.evolve(TRAINING, outputs=frozenset()),
            publication_edges=(),
            outputs=frozenset(),
        ),
        "W2: training operator 'actor_training' does not write the weights of 'actor'",
        "W2: 'actor_training' does not publish its weights to 'actor_generation'",
    ),
    "two trainings of one model": (
        with_operators(
            GENERATION,
            TRAINING,
            attrs.evolve(TRAINING, name="again"),
            data_edges=(*MINI.data_edges, DataEdge("actor_generation", "again", "completions")),
            publication_edges=(*MINI.publication_edges, PublicationEdge("again", "actor_generation", "W_actor")),
        ),
        "W2: 'actor_training' and 'again' both train 'actor'",
    ),
    "training of a frozen model": (
        with_model(trainable=False, staleness=0),
        "W2: 'actor_training' trains 'actor', which is declared frozen",
    ),
    "publication to an operator without the model": (
        with_operators(attrs.evolve(GENERATION, model=None, role=Role.INFERENCE, seconds_per_sample=1.0), TRAINING),
        "W2: publication edge actor_training -W_actor-> actor_generation: 'actor_generation' does not invoke "
        "model 'actor'",
    ),
    "undeclared graph input": (
        attrs.evolve(MINI, inputs=frozenset({"W_actor"})),
        "W3: container 'prompts' is read but nothing writes it and it is no graph input",
    ),
    "undeclared graph output": (
        with_operators(
            attrs.evolve(GENERATION, outputs=frozenset({"completions", "lengths"})),
            TRAINING,
            containers=(*MINI.containers, attrs.evolve(COMPLETIONS, name="lengths")),
        ),
        "W3: container 'lengths' is written but nothing reads it and it is no graph output",
    ),
    "undeclared weights": (
        attrs.evolve(MINI, inputs=frozenset({"prompts"}), outputs=frozenset()),
        "W3: weights 'W_actor' are read but are no graph input (their version 0)",
        "W3: weights 'W_actor' are written but are no graph output",
    ),
    "idle boundary": (
        attrs.evolve(
            MINI,
            containers=(*MINI.containers, attrs.evolve(PROMPTS, name="labels")),
            inputs=MINI.inputs | {"labels"},
            outputs=MINI.outputs | {"prompts"},
        ),
        "W3: graph input 'labels' is read by no operator",
        "W3: graph output 'prompts' is written by no operator",
    ),
    "cycle of one": (
        with_operators(
            attrs.evolve(GENERATION, inputs=GENERATION.inputs | {"completions"}),
            TRAINING,
            data_edges=(*MINI.data_edges, DataEdge("actor_generation", "actor_generation", "completions")),
        ),
        "W4: data edges form a cycle: actor_generation -> actor_generation",
    ),
}


@pytest.mark.parametrize(("graph", "expected"), [(g, list(e)) for g, *e in BROKEN.values()], ids=list(BROKEN))
def test_violation(graph, expected):
    assert violations(graph) == expected


def test_the_weights_of_another_model_cannot_be_published():
    graph = toy_actor_critic()
    other = attrs.evolve(graph.models[0], name="other")
    weights = attrs.evolve(graph.container("W_shared"), name="W_other", model="other")
    generation, value, training = graph.operators
    graph = attrs.evolve(
        graph,
        models=(*graph.models, other),
        containers=(*graph.containers, weights),
        operators=(
            attrs.evolve(generation, inputs=generation.inputs | {"W_other"}),
            value,
            attrs.evolve(training, outputs=training.outputs | {"W_other"}),
        ),
        publication_edges=(*graph.publication_edges, PublicationEdge("training", "generation", "W_other")),
        inputs=graph.inputs | {"W_other"},
        outputs=graph.outputs | {"W_other"},
    )
    assert violations(graph) == [
        "W2: publication edge training -W_other-> generation: container 'W_other' does not hold the weights "
        "of model 'shared'"
    ]


def test_a_long_cycle_is_named_in_order():
    names = ["a", "b", "c"]
    graph = attrs.evolve(
        MINI,
        containers=tuple(
            Container(name=f"from_{name}", kind=ContainerKind.DATA, elements=1, bytes_per_element=2) for name in names
        ),
        operators=tuple(
            Operator(
                name=name,
                role=Role.INFERENCE,
                model=None,
                inputs=frozenset({f"from_{previous}"}),
                outputs=frozenset({f"from_{name}"}),
                seconds_per_sample=0.0,
            )
            for previous, name in zip("cab", names, strict=True)
        ),
        data_edges=(DataEdge("a", "b", "from_a"), DataEdge("b", "c", "from_b"), DataEdge("c", "a", "from_c")),
        publication_edges=(),
        inputs=frozenset(),
        outputs=frozenset(),
    )
    assert violations(graph) == ["W4: data edges form a cycle: a -> b -> c -> a"]


def test_every_violation_is_reported_at_once():
    """One graph that breaks W1, W2, W3 (twice) and W4."""
    graph = attrs.evolve(
        MINI,
        data_edges=(*MINI.data_edges, DataEdge("actor_training", "actor_generation", "prompts")),
        publication_edges=(
            *MINI.publication_edges,
            PublicationEdge("actor_generation", "actor_training", "completions"),
        ),
        inputs=frozenset({"prompts"}),
        outputs=frozenset({"W_actor", "prompts"}),
    )
    expected = (
        "W1: edge actor_training -prompts-> actor_generation: 'actor_training' does not write container 'prompts'",
        "W2: publication edge actor_generation -completions-> actor_training: 'actor_generation' is not a "
        "training operator",
        "W2: publication edge actor_generation -completions-> actor_training: container 'completions' does "
        "not hold the weights of model 'actor'",
        "W3: weights 'W_actor' are read but are no graph input (their version 0)",
        "W3: graph output 'prompts' is written by no operator",
        "W4: data edges form a cycle: actor_generation -> actor_training -> actor_generation",
    )
    with pytest.raises(GraphError) as caught:
        require_well_formed(graph)
    assert caught.value.facts == expected
    assert str(caught.value) == "\n".join(
        [
            "error[graph]: the graph 'mini' is not well-formed",
            *(f"  {line}" for line in expected),
            "hint: correct the algorithm template",
        ]
    )


def test_a_well_formed_graph_is_returned_itself():
    assert require_well_formed(MINI) is MINI


@given(rpegs(), st.data())
def test_a_missing_boundary_container_is_the_one_violation(graph, data):
    name = data.draw(st.sampled_from(sorted(graph.inputs)))
    found = violations(attrs.evolve(graph, inputs=graph.inputs - {name}))
    assert len(found) == 1
    assert found[0].startswith("W3: ")
    assert repr(name) in found[0]


@given(rpegs(), st.data())
def test_a_container_that_is_no_longer_written_breaks_each_of_its_edges(graph, data):
    name = data.draw(st.sampled_from(sorted({op.name for op in graph.operators if op.role is not Role.TRAINING})))
    silent = tuple(attrs.evolve(op, outputs=frozenset()) if op.name == name else op for op in graph.operators)
    outputs = graph.outputs - graph.operator(name).outputs
    found = violations(attrs.evolve(graph, operators=silent, outputs=outputs))
    edges = [edge for edge in graph.data_edges if edge.source == name]
    assert [line for line in found if line.startswith("W1")] == [
        f"W1: edge {name} -{edge.container}-> {edge.target}: {name!r} does not write container {edge.container!r}"
        for edge in edges
    ]


@given(rpegs(), st.data())
def test_a_renamed_operator_is_reported_for_every_edge_end(graph, data):
    name = data.draw(st.sampled_from([op.name for op in graph.operators]))
    renamed = tuple(attrs.evolve(op, name="renamed") if op.name == name else op for op in graph.operators)
    ends = [e for edge in (*graph.data_edges, *graph.publication_edges) for e in (edge.source, edge.target)]
    assert len(violations(attrs.evolve(graph, operators=renamed))) == ends.count(name)
