"""The session that ``rpeg run`` opens, on a real plan of the installed plugins."""

from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest
from rpeg_plugin_simulator import SIMULATOR, Settings

from rpeg_core.errors import BackendError, SettingsError
from rpeg_core.planning.plan import Plan
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.starts import concurrent
from rpeg_core.plugins.registry import Registry
from rpeg_core.runtime.session import RunRequest
from rpeg_core.runtime.trace import Bound, Stopped, Trace
from rpeg_core.runtime.verify import verify_plan
from rpeg_core.spec.experiment import parse_experiment

MODEL = {"config": "meta-llama/Llama-3.1-8B"}


@pytest.fixture(scope="module")
def plan() -> Plan:
    experiment = parse_experiment(
        {
            "algorithm": "grpo",
            "models": {"actor": MODEL, "reward": MODEL, "reference": {"same_as": "actor"}},
            "workload": {
                "prompts": 64,
                "rollouts_per_prompt": 8,
                "prompt_tokens": 512,
                "response_tokens": 1024,
                "response_lengths": [[0.5, 256], [0.85, 512], [1.0, 1024]],
            },
            "cluster": {"hardware": "gh200", "racks": 1, "nodes_per_rack": 4, "gpus_per_node": 4},
            "structure": {"staleness": [1]},
            "search": {"strategy": "concurrent"},
        }
    )
    planner = Planner(experiment, Registry())
    structure = planner.problem().structures[0]
    return planner.plan(structure, structure.plan(concurrent(structure)), {})


def run(plan: Plan, steps: int | None = None, **values: object) -> Trace:
    with SIMULATOR.open(plan, Settings(**values)) as session:
        return session.run(RunRequest(steps=steps))


def test_a_trace_names_the_plan_and_the_clock(plan: Plan) -> None:
    header = run(plan).header
    assert (header.plan, header.backend, header.steps, header.clock) == (plan.digest, "simulator", 8, "virtual")
    assert header.notes[0].startswith("a step takes ")


def test_the_command_or_the_setting_chooses_the_number_of_steps(plan: Plan) -> None:
    assert run(plan, steps=3).header.steps == 3
    assert run(plan, steps=5).header.steps == 5


def test_an_exact_run_is_close_to_the_prediction_and_a_noisy_one_is_not_the_same(plan: Plan) -> None:
    exact, noisy = run(plan), run(plan, noise=0.2, seed=1)
    assert exact.step_s == pytest.approx(plan.prediction.step_s, rel=0.15)
    assert noisy.step_s != exact.step_s
    assert noisy == run(plan, noise=0.2, seed=1)
    assert any(note.startswith("noise and sampled lengths: ") for note in noisy.header.notes)
    assert not any(note.startswith("noise and sampled lengths: ") for note in exact.header.notes)


def test_notes_explain_the_whole_difference(plan: Plan) -> None:
    trace = run(plan, steps=20, noise=0.1, sample_lengths=True)
    parts = [float(note.rpartition(": ")[2].split()[0]) for note in trace.header.notes[1:]]
    assert sum(parts) == pytest.approx(trace.step_s - plan.prediction.step_s, abs=1e-4 * trace.step_s)


def test_versions_lag_by_the_staleness(plan: Plan) -> None:
    trace = run(plan, steps=4)
    names = {d.node: (d.operator, d.step) for d, _, _ in trace.intervals() if d.kind == "OP"}
    bound = {names[r.node]: r.version for r in trace.records if isinstance(r, Bound) and r.node in names}
    assert [bound["actor_generation", k] for k in range(4)] == [0, 0, 1, 2]
    assert [bound["actor_training", k] for k in range(4)] == [0, 1, 2, 3]


def test_progress_is_told_of_every_step(plan: Plan) -> None:
    seen: list[tuple[int, float, float]] = []

    def finished(step: int, metrics: Mapping[str, float]) -> None:
        seen.append((step, metrics["seconds"], metrics["time_s"]))

    with SIMULATOR.open(plan, Settings()) as session:
        trace = session.run(RunRequest(steps=6, step_finished=finished))
    assert [step for step, _, _ in seen] == list(range(6))
    assert sum(seconds for _, seconds, _ in seen) == pytest.approx(trace.makespan_s)
    assert seen[-1][2] == trace.makespan_s


def test_a_cancelled_run_stops_where_it_is_and_its_trace_is_accepted(plan: Plan, tmp_path: Path) -> None:
    done: list[int] = []
    request = RunRequest(
        steps=50,
        output=tmp_path,
        step_finished=lambda step, metrics: done.append(step),
        cancelled=lambda: len(done) == 3,
    )
    with SIMULATOR.open(plan, Settings()) as session:
        trace = session.run(request)
    assert done == [0, 1, 2]
    assert isinstance(trace.records[-1], Stopped)
    assert trace == Trace.read(tmp_path / "trace.jsonl")
    verdict = verify_plan(plan, tmp_path / "trace.jsonl")
    assert (verdict.accepted, verdict.complete, verdict.steps_complete) == (True, False, 3)


def test_there_is_nothing_to_resume_from(plan: Plan, tmp_path: Path) -> None:
    with SIMULATOR.open(plan, Settings()) as session, pytest.raises(BackendError, match="keeps no checkpoints"):
        session.run(RunRequest(output=tmp_path, resume=True))


def test_lengths_cannot_be_sampled_without_quantiles(plan: Plan) -> None:
    experiment = attrs.evolve(plan.experiment, workload=attrs.evolve(plan.workload, response_lengths=()))
    with pytest.raises(SettingsError, match="sample_lengths is true, but the plan's workload has no"):
        SIMULATOR.open(attrs.evolve(plan, experiment=experiment), Settings(sample_lengths=True))


def test_a_plan_of_other_plugins_is_run_with_a_note(plan: Plan) -> None:
    other = attrs.evolve(plan, prediction=attrs.evolve(plan.prediction, step_s=2 * plan.prediction.step_s))
    (note,) = [n for n in run(other).header.notes if n.startswith("plugins that changed")]
    assert float(note.split(": ")[1].split()[0]) == pytest.approx(-plan.prediction.step_s, rel=1e-5)
