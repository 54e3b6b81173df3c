"""The compiled evaluator equals the readable one to the last bit, on random problems full of ties."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import attrs
import numba
import numpy as np
import pytest
import rpeg_plugin_dpo
import rpeg_plugin_gh200
import rpeg_plugin_grpo
import rpeg_plugin_ppo
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from rpeg_plugin_analytical import rpeg_cost_terms

from rpeg_core.costing.batches import Layouts, MemoryBatch, OperatorBatch, TransferBatch
from rpeg_core.costing.book import ActiveTerm
from rpeg_core.errors import CostTermError
from rpeg_core.ir import Rpeg, RpegBuilder
from rpeg_core.passes.evaluate import EvaluationOptions
from rpeg_core.planning.compiled import CompiledEvaluator, kernel
from rpeg_core.planning.problem import ReadableEvaluator, StructureProblem, build_structure
from rpeg_core.planning.structures import Structure
from rpeg_core.records import AlgorithmTemplate, CostTerm, MemoryKind, Target
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.spec.models import Head
from rpeg_core.spec.public_models import public_model
from rpeg_core.spec.workload import LengthQuantile, Workload
from rpeg_core.testing.strategies import axes_of_operators, rpegs, workloads
from rpeg_core.testing.toys import (
    SKEWED,
    active,
    toy_hardware,
    toy_model,
    toy_ppo,
    toy_seconds_term,
    toy_workload,
)

CHOICES = 6  # per problem


@attrs.frozen
class RandomCosts:
    """Cost terms with a random but fixed number per layout, transfer or shard.

    ``whole_numbers`` makes them small integers, so that many nodes start, finish and rank alike.
    """

    seed: int
    whole_numbers: bool

    def number(self, *key: object) -> float:
        draw = random.Random(repr((self.seed, *key)))
        return float(draw.randint(1, 3)) if self.whole_numbers else draw.random() + 1e-3

    def terms(self) -> list[ActiveTerm]:
        functions = [(Target.OPERATOR, None, self.seconds), (Target.TRANSFER, None, self.transfer)]
        functions += [(Target.MEMORY, kind, self.bytes_of(kind)) for kind in MemoryKind]
        return [
            active(
                CostTerm(
                    name=f"random.{i}",
                    summary="random",
                    target=target,
                    quantity="random",
                    function=function,
                    memory=kind,
                )
            )
            for i, (target, kind, function) in enumerate(functions)
        ]

    def seconds(self, batch: OperatorBatch) -> np.ndarray:
        name = "" if batch.model is None else batch.model.name
        rest = (name, batch.role.value, batch.prefill, [phase.index for phase in batch.phases], batch.sequences)
        return np.array([self.number(*rest, row) for row in _rows(batch.layouts)])

    def transfer(self, batch: TransferBatch) -> np.ndarray:
        columns = (batch.source_gpus, batch.destination_gpus, batch.tier)
        keys = zip(*(column.tolist() for column in columns), strict=True)
        latency = np.array([self.number("link", batch.reshard, *key) - 1.0 for key in keys])
        linear = np.floor(batch.bytes / 5000.0) if self.whole_numbers else batch.bytes / 7777.0
        return np.maximum(latency, 0.0) + linear

    def bytes_of(self, kind: MemoryKind) -> object:
        def function(batch: MemoryBatch) -> np.ndarray:
            name = "" if batch.model is None else batch.model.name
            return np.array([self.number(kind.value, name, batch.role.value, row) for row in _rows(batch.layouts)])

        return function


def _rows(layouts: Layouts) -> list[tuple[int, ...]]:
    columns = (layouts.data, layouts.pipeline, layouts.tensor, layouts.context, layouts.expert, layouts.microbatches)
    return list(zip(*(column.tolist() for column in columns), map(layouts.mode_of, range(len(layouts))), strict=True))


@st.composite
def problems(draw: st.DrawFn) -> StructureProblem:
    """Machines whose nodes, and racks, are not powers of two have allocations that overlap in part."""
    machine = DeviceSpace(
        racks=draw(st.integers(1, 2)),
        nodes_per_rack=draw(st.integers(1, 4)),
        gpus_per_node=draw(st.sampled_from((1, 2, 3, 4, 6))),
    )
    costs = RandomCosts(draw(st.integers(0, 2**32)), draw(st.booleans()))
    rpeg = draw(rpegs())
    return build_structure(
        structure=Structure(staleness=()),
        rpeg=rpeg,
        machine=machine,
        hardware=toy_hardware(),
        workload=draw(workloads()),
        terms=costs.terms(),
        options=EvaluationOptions(
            steps=draw(st.integers(1, 6)),
            split_lengths=draw(st.booleans()),
            reserve_source=draw(st.booleans()),
        ),
        axes=draw(axes_of_operators(rpeg)),
    )


def choices_of(problem: StructureProblem, count: int, seed: int) -> np.ndarray:
    """Random choices in which operators often share an allocation, or a whole assignment."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        row: list[int] = []
        for candidates in problem.candidates:
            index = draw.randrange(len(candidates))
            if row and draw.random() < 0.5:
                earlier = draw.randrange(len(row))
                other = problem.candidates[earlier].assignment(row[earlier])
                same = candidates.find(other)
                beside = np.flatnonzero(
                    (candidates.start == other.allocation.start) & (candidates.stop == other.allocation.stop)
                )
                if same is not None and draw.random() < 0.5:
                    index = same
                elif len(beside):
                    index = int(draw.choice(beside.tolist()))
            row.append(index)
        rows.append(row)
    return np.array(rows, np.int64)


def assert_equal(problem: StructureProblem, compiled: CompiledEvaluator, choices: np.ndarray) -> None:
    readable = ReadableEvaluator(problem)
    for choice in choices:
        expected = problem.predict(problem.plan(choice))
        schedule = compiled.schedule_of(choice)
        assert tuple(schedule.order) == expected.schedule.order
        assert tuple(schedule.start_s) == expected.schedule.start_s
        assert tuple(schedule.finish_s) == expected.schedule.finish_s
        assert compiled.evaluate(choice) == expected.evaluation
        assert tuple(compiled.critical_seconds(choice)) == tuple(readable.critical_seconds(choice))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(problems(), st.integers(0, 2**32))
def test_equals_readable_evaluator(problem: StructureProblem, seed: int) -> None:
    assume(problem.empty_operator is None)
    assert_equal(problem, CompiledEvaluator(problem), choices_of(problem, CHOICES, seed))


def random_problem(
    rpeg: Rpeg,
    machine: DeviceSpace,
    *,
    workload: Workload | None = None,
    whole_numbers: bool = True,
    memory_bytes: int = 1000,
    **options: object,
) -> StructureProblem:
    return build_structure(
        structure=Structure(staleness=()),
        rpeg=rpeg,
        machine=machine,
        hardware=toy_hardware(memory_bytes=memory_bytes),
        workload=workload or toy_workload(),
        terms=RandomCosts(7, whole_numbers).terms(),
        options=EvaluationOptions(**options),
    )


def test_overlaps_in_part_are_exercised_and_equal() -> None:
    """Nodes of six GPUs: GPUs 3-5 and 2-3 share one GPU, so that weights move for all but a part."""
    machine = DeviceSpace(racks=1, nodes_per_rack=3, gpus_per_node=6)
    problem = random_problem(toy_ppo(tau=1), machine, workload=toy_workload(prompts=48), whole_numbers=False, steps=4)
    generation, training = (problem.operators.index(f"actor_{role}") for role in ("generation", "training"))
    a, b = problem.candidates[generation], problem.candidates[training]
    shared = np.minimum.outer(a.stop, b.stop) - np.maximum.outer(a.start, b.start)
    smaller = np.minimum.outer(a.stop - a.start, b.stop - b.start)
    partial = np.argwhere((shared > 0) & (shared < smaller))[::3]
    assert len(partial) > 30
    choices = choices_of(problem, len(partial), 0)
    choices[:, [generation, training]] = partial
    assert_equal(problem, CompiledEvaluator(problem), choices)


def test_long_horizon_with_four_phases_is_equal() -> None:
    quantiles = (LengthQuantile(0.1, 10), LengthQuantile(0.5, 30), LengthQuantile(0.9, 60), LengthQuantile(1.0, 100))
    problem = random_problem(
        toy_ppo(tau=2, critic_tau=0),
        DeviceSpace(racks=2, nodes_per_rack=2, gpus_per_node=4),
        workload=toy_workload(response_lengths=quantiles),
        steps=16,
    )
    assert_equal(problem, CompiledEvaluator(problem), choices_of(problem, 40, 1))


def test_a_split_generation_that_reads_another_is_equal() -> None:
    """Both are split because an inference elsewhere reads their rows; between them all rows move at once."""
    b = RpegBuilder("two generations")
    for name in ("first", "second", "judge"):
        b.model(name, toy_model(name), trainable=False)
    drafts, answers = (b.data(name, elements=3200, bytes_per_element=2) for name in ("drafts", "answers"))
    b.generation("draft", "first", reads=[], writes=[drafts])
    b.generation("answer", "second", reads=[drafts], writes=[answers])
    b.inference("judge", "judge", reads=[drafts, answers], writes=[])
    b.connect("draft", drafts, "answer", "judge")
    b.connect("answer", answers, "judge")
    problem = random_problem(
        b.build(),
        DeviceSpace(racks=1, nodes_per_rack=2, gpus_per_node=2),
        workload=toy_workload(response_lengths=SKEWED),
        steps=3,
    )
    compiled, choices = CompiledEvaluator(problem), choices_of(problem, 200, 3)
    shared = []
    for choice in choices:
        plan = problem.plan(choice)
        first, second, judge = (plan[name].allocation for name in ("draft", "answer", "judge"))
        if first == second and judge.disjoint(first):
            shared.append(choice)
    assert len(shared) > 5
    assert_equal(problem, compiled, choices)


def test_result_does_not_depend_on_what_was_evaluated_before() -> None:
    problem = random_problem(toy_ppo(tau=1), DeviceSpace(racks=1, nodes_per_rack=4, gpus_per_node=4))
    choices = choices_of(problem, 100, 2)
    forward = CompiledEvaluator(problem).evaluate_many(choices)
    backward = CompiledEvaluator(problem).evaluate_many(choices[::-1])[::-1]
    assert np.array_equal(forward, backward)
    alone = [CompiledEvaluator(problem).evaluate_many(choices[i : i + 1])[0] for i in range(0, 100, 10)]
    assert np.array_equal(forward[::10], alone)


@pytest.mark.parametrize("bad", [(-1, 0, 0, 0, 0, 0), (10**6, 0, 0, 0, 0, 0), (0, 0)])
def test_choice_that_does_not_exist_is_refused(bad: tuple[int, ...]) -> None:
    problem = random_problem(toy_ppo(), DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4))
    with pytest.raises(IndexError, match="choice"):
        CompiledEvaluator(problem).evaluate(bad)


def test_costs_without_any_time_are_refused() -> None:
    problem = build_structure(
        structure=Structure(staleness=()),
        rpeg=toy_ppo(),
        machine=DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=1),
        hardware=toy_hardware(),
        workload=toy_workload(),
        terms=[active(toy_seconds_term({}))],
        options=EvaluationOptions(),
    )
    with pytest.raises(CostTermError, match="0 seconds"):
        CompiledEvaluator(problem).evaluate((0,) * 6)


def test_problem_in_which_nothing_fits_has_an_evaluator() -> None:
    problem = random_problem(toy_ppo(tau=1), DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4), memory_bytes=1)
    assert not any(len(candidates) for candidates in problem.candidates)
    with pytest.raises(IndexError):
        CompiledEvaluator(problem).evaluate((0,) * 6)


QUANTILES = (LengthQuantile(0.5, 96), LengthQuantile(0.85, 192), LengthQuantile(1.0, 384))


@pytest.mark.parametrize("tau", [0, 1, 2])
@pytest.mark.parametrize(
    ("template", "shared"),
    [
        (rpeg_plugin_ppo.TEMPLATE, False),
        (rpeg_plugin_ppo.TEMPLATE, True),
        (rpeg_plugin_grpo.TEMPLATE, False),
        (rpeg_plugin_dpo.TEMPLATE, False),
    ],
    ids=["ppo", "ppo-shared", "grpo", "dpo"],
)
def test_real_algorithms_are_equal(template: AlgorithmTemplate, shared: bool, tau: int) -> None:
    workload = Workload(
        prompts=64,
        rollouts_per_prompt=2,
        prompt_tokens=128,
        response_tokens=384,
        response_lengths=() if template.name == "dpo" else QUANTILES,
    )
    spec = public_model("meta-llama/Llama-2-7b-hf")
    models = {role.name: spec.with_head(Head(role.head)) for role in template.roles}
    names = ("actor_critic",) if shared else ("actor", "critic")
    structure = Structure(staleness=tuple((name, tau) for name in names), actor_critic_sharing=shared)
    [hardware] = rpeg_plugin_gh200.rpeg_hardware()
    problem = build_structure(
        structure=structure,
        rpeg=template.build(workload, models, structure, template.settings()),
        machine=DeviceSpace(racks=2, nodes_per_rack=4, gpus_per_node=4),
        hardware=hardware,
        workload=workload,
        terms=[active(term, term.settings()) for term in rpeg_cost_terms() if term.name.startswith("analytical.")],
        options=EvaluationOptions(steps=8),
    )
    assert_equal(problem, CompiledEvaluator(problem), choices_of(problem, 12, tau))


def test_search_uses_it() -> None:
    problem = random_problem(toy_ppo(), DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4))
    assert isinstance(problem.evaluator, CompiledEvaluator)


@pytest.mark.parametrize("command", ["--help", "list-plugins"])
def test_commands_that_do_not_plan_do_not_import_numba(command: str) -> None:
    code = (
        "import sys\n"
        "from rpeg_core.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, command], check=True, capture_output=True)


@pytest.mark.slow
def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    code = (
        "from numba.core import event\n"
        "from rpeg_core.planning.compiled import CompiledEvaluator\n"
        "from rpeg_core.spec.machine import DeviceSpace\n"
        "from rpeg_core.testing.toys import toy_mini\n"
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_compiled_evaluator import random_problem\n"
        "problem = random_problem(toy_mini(), DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=2))\n"
        "with event.install_recorder('numba:compile') as compiled:\n"
        "    print(CompiledEvaluator(problem).evaluate((0, 0)))\n"
        "print(len(compiled.buffer))"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
        ).stdout.splitlines()
        for _ in range(2)
    ]
    assert runs[0][0] == runs[1][0]
    assert int(runs[0][1]) > 0
    assert runs[1][1] == "0"


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_a_damaged_cache_is_compiled_again(tmp_path: Path, suffix: str) -> None:
    """Cut short, as by a full disk or a killed process; the process after that one compiles nothing."""
    module = tmp_path / "damaged.py"
    module.write_text(
        "from numba.core import event\n"
        "from rpeg_core.planning.compiled.kernel import jit\n"
        "@jit\n"
        "def double(x):\n"
        "    return 2 * x\n"
        "with event.install_recorder('numba:compile') as compiled:\n"
        "    print(double(21), len(compiled.buffer) > 0)\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def run() -> str:
        command = [sys.executable, str(module)]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    assert [run(), run()] == ["42 True", "42 False"]
    damaged = list((tmp_path / "cache").rglob(f"*double*.{suffix}"))
    assert damaged
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-20])
    assert [run(), run()] == ["42 True", "42 False"]


def test_cached_code_of_another_version_is_not_used() -> None:
    problem = random_problem(toy_ppo(), DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4))
    tables = CompiledEvaluator(problem).tables
    other = tables._replace(fingerprint=np.zeros(0, [("kernel_of_another_version", np.uint8)]))
    assert numba.typeof(tables) == numba.typeof(CompiledEvaluator(problem).tables)
    assert numba.typeof(tables) != numba.typeof(other)


def test_without_a_place_for_the_cache_it_compiles_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    njit = kernel.numba.njit

    def no_place(*arguments: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return njit(*arguments, **options)

    monkeypatch.setattr(kernel.numba, "njit", no_place)
    assert kernel.jit(lambda x: x + 1)(1) == 2
