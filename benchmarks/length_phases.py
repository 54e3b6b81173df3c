"""What length phases are worth on this machine, beside the prediction: ``python benchmarks/length_phases.py``.

PPO of a tiny llama with random weights, whose responses end after a geometrically distributed number of tokens, on two
single-threaded workers: one generates and trains the actor, the other assesses (reference, reward, values) and trains
the critic. ``rpeg profile-lengths`` measures the lengths; the plan with them is run split into phases and unsplit, in
turns. Cases differ in how heavy assessment is against decoding.

Printed for each case: medians over the repetitions of the seconds of a step, and of its part from the start of
generation to the end of assessment; unsplit / phases, measured and predicted. What is gained is that early rows are
assessed while others are decoded. Rows of like length are assessed together with and without phases, so that phases
compute no less padding; the last column checks it: assessment unsplit / in phases.

The profile ``host`` knows nothing of the time that Python takes for a token step, which is most of decoding here, so
that it predicts less to gain than there is; a profile that ``rpeg calibrate`` wrote (``--hardware FILE``) does.

    --quick     one repetition of small models, to see that it runs
    --check     exit 1 unless phases win by a tenth of a step where assessment is heavy

Times mean something on a machine that does nothing else and has a core for each worker.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import attrs
from rpeg_plugin_megatron import MEGATRON

from rpeg_core import Plan, Registry
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.solve import only_choice
from rpeg_core.report import words
from rpeg_core.runtime.lengths import LengthsRequest, Response, generation_alone, quantiles
from rpeg_core.runtime.session import RunRequest
from rpeg_core.runtime.trace import Trace
from rpeg_core.spec.experiment import parse_experiment

FRACTIONS = (0.5, 0.85, 1.0)
GAIN = 1.1
GENERATES, ASSESS = "actor_generation", ("reference_inference", "reward_inference", "critic_inference")


@attrs.frozen(kw_only=True)
class Case:
    """Widths of the actor (and its reference), of the reward model, and of the critic."""

    name: str
    actor: int
    reward: int
    critic: int


@attrs.frozen(kw_only=True)
class Size:
    """Of the workload: a vocabulary of ``vocab`` tokens, one of which ends a response, makes a mean of as many."""

    cases: tuple[Case, ...]
    prompts: int
    rollouts: int
    response_tokens: int
    vocab: int
    steps: int
    repetitions: int
    hardware: str = "host"


FULL = Size(
    cases=(
        Case(name="assessment light", actor=256, reward=128, critic=128),
        Case(name="assessment like decoding", actor=256, reward=256, critic=128),
        Case(name="assessment heavy", actor=256, reward=512, critic=128),
    ),
    prompts=8,
    rollouts=8,
    response_tokens=128,
    vocab=28,
    steps=3,
    repetitions=5,
)
QUICK = Size(
    cases=(Case(name="assessment heavy", actor=64, reward=128, critic=64),),
    prompts=8,
    rollouts=4,
    response_tokens=64,
    vocab=24,
    steps=2,
    repetitions=1,
)


def dimensions(width: int, vocab: int) -> dict[str, Any]:
    heads = max(2, width // 64)
    return {"layers": 4, "hidden": width, "heads": heads, "kv_heads": heads, "ffn": 4 * width, "vocab": vocab}


def experiment(case: Case, size: Size, lengths: list[list[float]], *, split: bool) -> dict[str, Any]:
    actor, reward, critic = (dimensions(width, size.vocab) for width in (case.actor, case.reward, case.critic))
    first, second = ({"gpus": gpu, "dp": 1, "pp": 1, "tp": 1, "microbatches": 1} for gpu in ("0", "1"))
    return {
        "algorithm": "ppo",
        "models": {
            "actor": {"config": actor},
            "reference": {"same_as": "actor"},
            "critic": {"config": critic},
            "reward": {"config": reward},
        },
        "workload": {
            "prompts": size.prompts,
            "rollouts_per_prompt": size.rollouts,
            "prompt_tokens": 8,
            "response_tokens": size.response_tokens,
            "bytes_per_element": 4,
            **({"response_lengths": lengths} if lengths else {}),
        },
        "cluster": {"hardware": size.hardware, "gpus_per_node": 2},
        "objective": {"split_lengths": split},
        "pin": {
            **dict.fromkeys((GENERATES, "actor_training"), first),
            **dict.fromkeys((*ASSESS, "critic_training"), second),
        },
        # So small a rate leaves the lengths what they were.
        "settings": {"ppo": {"learning_rate": 1e-9}, "megatron": {"task": "copy", "device": "cpu", "export": False}},
    }


def planned(document: dict[str, Any], registry: Registry) -> Plan:
    planner = Planner(parse_experiment(document), registry)
    problem = planner.problem()
    solution = only_choice(problem)
    if solution is None:
        raise SystemExit("the pins leave a choice")
    structure = problem.structures[solution.structure]
    return planner.plan(structure, structure.plan(solution.choice), {"strategy": None})


def settings(plan: Plan) -> Any:
    return MEGATRON.settings(**plan.experiment.settings["megatron"])


def profile(plan: Plan, responses: int) -> list[list[float]]:
    """Measured pairs for ``workload.response_lengths``."""
    found: list[Response] = []
    request = LengthsRequest(
        experiment=plan.experiment,
        graph=generation_alone(plan.rpeg),
        responses=responses,
        workers=2,
        tensor=1,
        measured=found.extend,
        cancelled=lambda: False,
        status=lambda text: None,
    )
    assert MEGATRON.profile is not None
    MEGATRON.profile(request, settings(plan))
    pairs = quantiles([response.tokens for response in found], FRACTIONS, plan.workload.response_tokens)
    return [[pair.fraction, pair.tokens] for pair in pairs]


@attrs.frozen(kw_only=True)
class Times:
    """Medians of the steps of a run but its first, seconds."""

    step_s: float
    until_assessed_s: float
    assessing_s: float


def executed(plan: Plan, steps: int) -> Times:
    with MEGATRON.open(plan, settings(plan)) as session:
        return times(session.run(RunRequest(steps=steps)))


def times(trace: Trace) -> Times:
    ends: dict[int, float] = {}
    begins: dict[int, float] = {}
    assessed: dict[int, float] = {}
    work: dict[int, float] = {}
    for node, start_s, end_s in trace.intervals():
        ends[node.step] = max(ends.get(node.step, 0.0), end_s)
        if node.kind == "OP" and node.operator == GENERATES:
            begins[node.step] = min(begins.get(node.step, start_s), start_s)
        if node.kind == "OP" and node.operator in ASSESS:
            assessed[node.step] = max(assessed.get(node.step, 0.0), end_s)
            work[node.step] = work.get(node.step, 0.0) + end_s - start_s
    steps = sorted(ends)[1:]
    return Times(
        step_s=statistics.median(ends[step] - ends[step - 1] for step in steps),
        until_assessed_s=statistics.median(assessed[step] - begins[step] for step in steps),
        assessing_s=statistics.median(work[step] for step in steps),
    )


@attrs.frozen(kw_only=True)
class Row:
    """A case: medians over the repetitions, and predicted seconds of a step."""

    name: str
    lengths: list[list[float]]
    unsplit: Times
    phases: Times
    ratio: float
    predicted_unsplit_s: float
    predicted_phases_s: float

    @property
    def predicted_ratio(self) -> float:
        return self.predicted_unsplit_s / self.predicted_phases_s


def measure(case: Case, size: Size, registry: Registry) -> Row:
    lengths = profile(planned(experiment(case, size, [], split=False), registry), size.prompts * size.rollouts)
    plans = {split: planned(experiment(case, size, lengths, split=split), registry) for split in (False, True)}
    runs: dict[bool, list[Times]] = {False: [], True: []}
    for _ in range(size.repetitions):
        for split, plan in plans.items():
            runs[split].append(executed(plan, size.steps))
    ratios = [a.step_s / b.step_s for a, b in zip(runs[False], runs[True], strict=True)]
    return Row(
        name=case.name,
        lengths=lengths,
        unsplit=median(runs[False]),
        phases=median(runs[True]),
        ratio=statistics.median(ratios),
        predicted_unsplit_s=plans[False].prediction.step_s,
        predicted_phases_s=plans[True].prediction.step_s,
    )


def median(runs: list[Times]) -> Times:
    names = [field.name for field in attrs.fields(Times)]
    return Times(**{name: statistics.median(getattr(run, name) for run in runs) for name in names})


def show(row: Row) -> None:
    lengths = ", ".join(f"{fraction:.0%} by {tokens}" for fraction, tokens in row.lengths)
    cells = [
        row.name,
        lengths,
        *(
            f"{words.seconds(getattr(row.unsplit, name))} / {words.seconds(getattr(row.phases, name))}"
            for name in ("step_s", "until_assessed_s")
        ),
        f"{row.ratio:.2f}",
        f"{row.predicted_ratio:.2f}",
        f"{row.unsplit.until_assessed_s / row.phases.until_assessed_s:.2f}",
        f"{row.unsplit.assessing_s / row.phases.assessing_s:.2f}",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--repeat", type=int, help="repetitions")
    parser.add_argument("--hardware", default="host", help="profile to predict with, e.g. a file of rpeg calibrate")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size = attrs.evolve(QUICK if options.quick else FULL, hardware=options.hardware)
    if options.repeat is not None:
        size = attrs.evolve(size, repetitions=options.repeat)
    os.environ["OMP_NUM_THREADS"] = "1"
    load = os.getloadavg()[0]
    print(f"{size.repetitions} repetitions of {size.steps} steps; {size.prompts * size.rollouts} responses of at most")
    print(f"{size.response_tokens} tokens; load of the machine before: {load:.1f}\n")
    registry = Registry(report=lambda text: print(text, file=sys.stderr))
    print("| case | responses | step: unsplit / phases | until assessed: unsplit / phases | ratio of steps |", end="")
    print(" predicted | ratio until assessed | ratio of assessment |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for case in size.cases:
        if options.only is None or options.only in case.name:
            rows.append(measure(case, size, registry))
            show(rows[-1])
    if options.json is not None:
        options.json.write_text(json.dumps([attrs.asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    heavy = [row for row in rows if row.name == "assessment heavy"]
    return int(options.check and not all(row.ratio >= GAIN for row in heavy))


if __name__ == "__main__":
    sys.exit(main())
