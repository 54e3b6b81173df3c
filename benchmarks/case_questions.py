"""The questions that public_cases.yaml asks, each answered by the part of RPEG that a user would ask.

A question gives an :class:`Answer`: a verdict in one word or two, and the number behind it. A fact that a source does
not give is a list in the table: the question is then asked for every combination, and the verdict counts only if it is
always the same.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from rpeg_plugin_analytical.engine_memory import Engine, engine_memory
from rpeg_plugin_analytical.host_memory import Offloaded, host_memory

from rpeg_core.costing.batches import MemoryBatch, OperatorBatch, TransferBatch
from rpeg_core.errors import PinError
from rpeg_core.ir import Role
from rpeg_core.passes.evaluate import EvaluationOptions, evaluate
from rpeg_core.passes.score import Evaluation, Objective, usable_bytes
from rpeg_core.planning.footprint import least_memory
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.solve import only_choice
from rpeg_core.plugins.registry import Registry
from rpeg_core.records import Target
from rpeg_core.spec.execution import Execution, Recompute, Sharding
from rpeg_core.spec.experiment import parse_experiment
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.public_models import load_model
from rpeg_core.spec.workload import Workload
from rpeg_core.testing.toys import on, toy_book, toy_mini, toy_plan, toy_ppo, toy_transfer_term, toy_workload
from rpeg_core.validation.replay import operator_terms
from rpeg_core.validation.rl import exponential_quantiles
from rpeg_core.validation.training import layouts_of

__all__ = ["QUESTIONS", "Answer", "Asker"]

GB = 1e9
ENDLESS_GB = 1e9
FITS, FULL = "fits", "out of memory"


@attrs.frozen
class Answer:
    """RPEG's verdict and the number behind it; of several answers the smallest and the largest ``size`` are shown."""

    verdict: str
    number: str
    size: float = 0.0


class Asker:
    """The installed plugins, and the models that a table describes.

    Args:
        registry: where plugins come from.
        models: name -> dimensions, for models that RPEG does not bundle.
    """

    def __init__(self, registry: Registry, models: Mapping[str, Mapping[str, Any]]) -> None:
        self._registry, self._models = registry, models
        self.terms = operator_terms(registry, ("analytical",))

    def model(self, name: str) -> ModelSpec:
        described = self._models.get(name)
        if described is None:
            return load_model(name, base_dir=Path())
        dimensions = {key: value for key, value in described.items() if key != "source"}
        return load_model(dimensions, base_dir=Path(), name=name)

    def hardware(self, name: str, memory_gb: float | None = None) -> Any:
        record = self._registry.get("hardware", name).record
        if memory_gb is None:
            return record
        return attrs.evolve(record, device=attrs.evolve(record.device, memory_bytes=round(memory_gb * GB)))

    def planner(self, experiment: Mapping[str, Any], **cluster: Any) -> Planner:
        document = {**experiment, "cluster": {**experiment["cluster"], **cluster}}
        return Planner(parse_experiment(document), self._registry)

    def ask(self, question: Mapping[str, Any]) -> Answer:
        """The answer to a question, or ``it depends`` when it differs over what is not known."""
        kind = QUESTIONS[question["ask"]]
        facts = {key: value for key, value in question.items() if key not in ("ask", "range", "reality")}
        ranges = question.get("range", {})
        answers = [
            kind(self, _with(facts, dict(zip(ranges, values, strict=True))))
            for values in itertools.product(*ranges.values())
        ]
        verdicts = {answer.verdict for answer in answers}
        ends = [pick(answers, key=lambda answer: answer.size).number for pick in (min, max)]
        shown = ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
        return Answer(answers[0].verdict if len(verdicts) == 1 else "it depends", shown)


def _with(facts: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """``facts`` with values at dotted paths."""
    found = {key: dict(value) if isinstance(value, dict) else value for key, value in facts.items()}
    for path, value in values.items():
        *outer, last = path.split(".")
        place = found
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = value
    return found


def _training_terms(asker: Asker, facts: Mapping[str, Any], role: Role = Role.TRAINING) -> dict[str, float]:
    """Bytes by term of one training operator on one GPU."""
    model, degrees = asker.model(facts["model"]), {"dp": 1, "pp": 1, "tp": 1, **facts["layout"]}
    hardware = asker.hardware(facts["gpu"], facts.get("memory_gb"))
    microbatches = degrees.get("microbatches", degrees["pp"])
    sequences = degrees["dp"] * microbatches * facts.get("sequences", 1)
    tokens = facts["tokens"]
    batch = MemoryBatch(
        role=role,
        model=model,
        seconds_per_sample=None,
        workload=Workload(prompts=sequences, prompt_tokens=tokens // 2, response_tokens=tokens - tokens // 2),
        machine=DeviceSpace(racks=1, nodes_per_rack=64, gpus_per_node=8),
        hardware=hardware,
        layouts=layouts_of(degrees["dp"], degrees["pp"], degrees["tp"], microbatches, 8),
        settings=None,
        execution=_execution(facts.get("execution", {})),
        trainable=role is Role.TRAINING,
    )
    return {
        term.quantity: float(term.function(attrs.evolve(batch, settings=settings))[0])
        for term, settings in asker.terms
        if term.target is Target.MEMORY
    }


def _execution(given: Mapping[str, Any]) -> Execution:
    values = dict(given)
    for key, enumeration in (("recompute", Recompute), ("sharding", Sharding)):
        if key in values:
            values[key] = enumeration(values[key])
    return Execution(**values)


def _limit(asker: Asker, facts: Mapping[str, Any]) -> float:
    return usable_bytes(asker.hardware(facts["gpu"], facts.get("memory_gb")).device.memory_bytes)


def training(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """Does the training fit? ``step: 1`` is before the optimizer has any state."""
    terms = _training_terms(asker, facts)
    if facts.get("step") == 1:
        terms["optimizer state"] = 0.0
    needed = sum(terms.values())
    if "frozen" in facts:  # the weights of a reference on the same GPU
        needed += _training_terms(asker, {**facts, "model": facts["frozen"]}, Role.INFERENCE)["weights"]
    if "engine" in facts:  # one that sleeps meanwhile
        hardware = asker.hardware(facts["gpu"], facts.get("memory_gb"))
        served = engine_memory(asker.model(facts["model"]), Engine(**facts["engine"]), hardware.device.memory_bytes)
        needed += served.asleep(1)[0]
    limit = _limit(asker, facts)
    return Answer(FITS if needed <= limit else FULL, f"{needed / GB:.1f} of {limit / GB:.1f} GB", needed)


def estimate(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """Is a published estimate of a training's memory met within ``within``?"""
    needed, other = sum(_training_terms(asker, facts).values()), facts["published_gib"] * 2**30
    far = abs(needed / other - 1.0)
    verdict = "agrees" if far <= facts["within"] else "differs"
    return Answer(
        verdict, f"{needed / 2**30:.1f} GiB, published {facts['published_gib']:g} ({needed / other - 1:+.0%})"
    )


def later_step(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """Does a step with the optimizer's state need more than one without, in a pass that also holds ``term``?"""
    terms = _training_terms(asker, facts)
    state, whole = terms["optimizer state"], sum(terms.values())
    verdict = "a later step" if state > 0 and terms[facts["term"]] > 0 else "the first step"
    number = f"{(whole - state) / GB:.1f} without the optimizer's state, {whole / GB:.1f} GB with it"
    return Answer(verdict, f"{number}, {terms[facts['term']] / GB:.1f} of {facts['term']}", whole)


def smaller(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """Which of two layouts needs less, and by how much a term differs."""
    first, second = (_training_terms(asker, _with(facts, facts[side])) for side in ("first", "second"))
    term, peaks = facts["term"], [sum(first.values()), sum(second.values())]
    name = "first" if peaks[0] <= peaks[1] else "second"
    return Answer(
        facts["names"][name],
        f"{peaks[0] / GB:.1f} → {peaks[1] / GB:.1f} GB, {term} {first[term] / GB:.1f} → {second[term] / GB:.1f} GB",
    )


def engine(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """Do an engine and its weight updates fit a GPU of ``memory_gib``?"""
    memory = facts["memory_gib"] * 2**30
    found = engine_memory(asker.model(facts["model"]), Engine(**facts["engine"]), memory)
    verdict = FITS if found.starts and found.peak <= memory else FULL
    return Answer(verdict, f"{found.peak / 2**30:.1f} of {facts['memory_gib']:g} GiB")


def admits(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """How many sequences does an engine hold: more or fewer than ``claimed``, and within ``factor`` of ``observed``?"""
    memory = facts["memory_gib"] * 2**30
    found = engine_memory(asker.model(facts["model"]), Engine(**facts["engine"]), memory)
    count, observed = found.sequences(facts["tokens"]), facts["observed"]
    if count >= facts["claimed"]:
        verdict = "as claimed"
    else:
        close = observed / facts["factor"] <= count <= observed * facts["factor"]
        verdict = f"far fewer than {facts['claimed']}" if close else "another number"
    return Answer(
        verdict, f"{count} sequences, weights {found.weights / 2**30:.1f} GiB, cache {found.cache / 2**30:.1f}"
    )


def host(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """Does a node's host memory hold what its trainers move there?"""
    trainer = {**facts["trainer"], "model": asker.model(facts["trainer"]["model"])}
    offloaded = Offloaded(**trainer)
    found = host_memory(
        [offloaded], facts["memory_gb"] * GB, engine_processes=facts.get("engine_processes", 0), ray=facts["ray"]
    )
    each = sum(offloaded.rank_bytes().values())
    return Answer(
        FITS if found.fits else FULL,
        f"{found.needed / GB:,.0f} of {found.limit / GB:,.0f} GB, {each / GB:.1f} per trainer",
        found.needed,
    )


def legal(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """Is a pinned plan legal?"""
    try:
        asker.planner(facts["experiment"]).problem()
    except PinError as error:
        reason = error.facts[0]
        return Answer(f"rejected, {reason.partition(':')[0]}", reason)
    return Answer("legal", "every pin can be met")


def any_plan(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """Does any plan fit? The number is the smallest peak of all plans."""
    limit = usable_bytes(asker.planner(facts["experiment"]).hardware.device.memory_bytes)
    problem = asker.planner(facts["experiment"], memory_gb=ENDLESS_GB).problem()
    solution = least_memory(problem, any_size=True)
    peak = _prediction(problem, solution).memory.peak.peak_bytes
    return Answer(FITS if peak <= limit else FULL, f"at least {peak / GB:.1f} of {limit / GB:.1f} GB", limit)


def _prediction(problem: Any, solution: Any) -> Any:
    structure = problem.structures[solution.structure]
    return structure.predict(structure.plan(solution.choice))


def together(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """Are all ``terms`` held at the moment of a training's peak?"""
    problem = asker.planner(facts["experiment"]).problem()
    peak = _prediction(problem, only_choice(problem)).memory.peak
    held = {item.quantity: item.bytes for item in peak.items if item.operator == facts["operator"]}
    verdict = "at the same time" if set(facts["terms"]) <= set(held) else "one after the other"
    return Answer(verdict, ", ".join(f"{term} {held.get(term, 0.0) / GB:.1f} GB" for term in facts["terms"]))


def shared_gpus(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """Does placing ``model`` on the trainer's GPUs, rather than apart, explain more memory there, and is it named?"""
    peaks = []
    for side in ("together", "apart"):
        pins = {**facts["experiment"]["pin"], **facts[side]}
        problem = asker.planner({**facts["experiment"], "pin": pins}).problem()
        segment = _prediction(problem, only_choice(problem)).memory.segments[0]
        named = sum(item.bytes for item in segment.items if item.model == facts["model"])
        peaks.append((segment.peak_bytes, named))
    more = peaks[0][0] - peaks[1][0]
    explained = more > 0 and peaks[1][1] == 0 and abs(more - peaks[0][1]) < 1.0
    numbers = (
        f"{peaks[1][0] / GB:.1f} GB apart, {peaks[0][0] / GB:.1f} together, {peaks[0][1] / GB:.1f} of {facts['model']}"
    )
    return Answer("explained" if explained else "not explained", numbers)


def generation_ratio(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """Does generation take more than in proportion to the tokens?"""
    seconds = [_generation_s(asker, facts, run) for run in facts["runs"]]
    ratio, tokens = seconds[1] / seconds[0], facts["runs"][1]["mean"] / facts["runs"][0]["mean"]
    verdict = "more than the tokens" if ratio > tokens else "as the tokens"
    return Answer(verdict, f"{ratio:.1f} times for {tokens:.0f} times the tokens", ratio)


def _generation_s(asker: Asker, facts: Mapping[str, Any], run: Mapping[str, Any]) -> float:
    """Seconds of a generation in as many rounds as the caches of the replicas need."""
    model, hardware = asker.model(run["model"]), asker.hardware(facts["gpu"])
    replicas = facts["gpus"] // facts["tp"]
    mine = facts["sequences"] // replicas
    served = engine_memory(
        model, Engine(tensor=facts["tp"], memory_share=facts["memory_share"]), hardware.device.memory_bytes
    )
    held = max(1, min(mine, served.sequences(facts["prompt"] + run["mean"] / 2.0), Engine().sequences))
    lengths = exponential_quantiles(run["mean"], facts["longest"], held * replicas)
    workload = Workload(
        prompts=held * replicas,
        prompt_tokens=facts["prompt"],
        response_tokens=lengths[-1].tokens,
        response_lengths=lengths,
    )
    batch = OperatorBatch(
        role=Role.GENERATION,
        model=model,
        seconds_per_sample=None,
        workload=workload,
        machine=DeviceSpace(racks=1, nodes_per_rack=max(1, facts["gpus"] // 8), gpus_per_node=8),
        hardware=hardware,
        layouts=layouts_of(replicas, 1, facts["tp"], 1, 8),
        settings=None,
        execution=Execution(framework="vllm", sharding=Sharding.NONE),
        sequences=held * replicas,
        prefill=True,
        phases=workload.phases,
    )
    terms = [(term, s) for term, s in asker.terms if term.target is Target.OPERATOR]
    round_s = sum(float(term.function(attrs.evolve(batch, settings=settings))[0]) for term, settings in terms)
    return round_s * mine / held


def transfer(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """How long do a model's weights take on the wire, resharded in place or sent from as many GPUs to as many?"""
    size, gpus = 2.0 * asker.model(facts["model"]).total_parameters, np.array([facts["gpus"]], np.int64)
    batch = TransferBatch(
        reshard=facts["reshard"],
        bytes=np.array([size]),
        source_gpus=gpus,
        destination_gpus=gpus,
        tier=np.array([facts["tier"]], np.int64),
        hardware=asker.hardware(facts["gpu"]),
        settings=None,
    )
    terms = [(term, settings) for term, settings in asker.terms if term.target is Target.TRANSFER]
    seconds = sum(float(term.function(attrs.evolve(batch, settings=settings))[0]) for term, settings in terms)
    return Answer("on the wire", f"{seconds:.2g} s", seconds)


def asynchrony(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """Sync or async, from measured seconds of generation and training on GPUs of their own."""
    machine, steps = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4), 100
    seconds = {("actor", "generation"): facts["generation_s"], ("actor", "training"): facts["training_s"]}
    plan = toy_plan(actor_generation=on(0, 2), actor_training=on(2, 4))
    found = []
    for tau in (0, 1):
        graph = toy_mini(tau=tau)
        book = toy_book(graph, machine, seconds=seconds, transfer=toy_transfer_term(bytes_per_s=1e12))
        found.append(evaluate(graph, plan, book, EvaluationOptions(steps=steps)).evaluation.makespan_s / steps)
    far = [predicted / observed - 1.0 for predicted, observed in zip(found, facts["observed_s"], strict=True)]
    verdict = "async" if found[1] < found[0] else "sync"
    close = max(map(abs, far)) <= facts["within"]
    return Answer(
        verdict if close else f"{verdict}, but far off",
        f"{found[0]:.1f} s sync ({far[0]:+.0%}), {found[1]:.1f} s async ({far[1]:+.0%})",
    )


def serial_reward(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """Is a reward hidden behind the rollout that it assesses, from the measured seconds of both?"""
    machine = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4)
    seconds = {("actor", "generation"): facts["generation_s"], ("reward", "inference"): facts["reward_s"]}
    graph = toy_ppo()
    plan = toy_plan(
        actor_generation=on(0, 2),
        reference_inference=on(2),
        reward_inference=on(3),
        critic_inference=on(2),
        actor_training=on(0, 2),
        critic_training=on(2, 4),
    )
    book = toy_book(graph, machine, toy_workload(), seconds=seconds, transfer=toy_transfer_term(bytes_per_s=1e12))
    step = evaluate(graph, plan, book, EvaluationOptions(steps=1)).evaluation.makespan_s
    whole = facts["generation_s"] + facts["reward_s"]
    return Answer(
        "serial" if step >= whole else "hidden", f"{step:.0f} s for {facts['generation_s']} + {facts['reward_s']} s"
    )


def objective(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """Which of two splits wins in time and which in GPU-hours, by RPEG's objectives on the measured steps."""
    runs = {
        name: Evaluation(
            makespan_s=run["step_s"],
            tokens_per_s=1.0 / run["step_s"],
            peak_ratio=0.5,
            utilization=1.0,
            used_gpus=run["gpus"],
        )
        for name, run in facts["runs"].items()
    }
    best = max(run.tokens_per_s for run in runs.values())

    def winner(kind: str) -> str:
        aim = Objective(kind=kind, max_throughput_loss=0.1)
        return max(runs, key=lambda name: aim.value(runs[name], best))

    hours = {name: run.used_gpus * run.makespan_s / 3600 for name, run in runs.items()}
    return Answer(
        f"time: {winner('throughput')}, GPU-hours: {winner('cost_per_token')}",
        ", ".join(f"{name} {value:.3f} GPU-hours" for name, value in hours.items()),
    )


def staleness(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """Is a bound on staleness kept across a resume, and is a trace that breaks it found out?"""
    from resumed_run import judged  # beside this file

    kept, broken = judged(facts["tau"], facts["first_step"], facts["steps"])
    verdict = "the bound is broken" if kept.accepted and not broken.accepted else "not noticed"
    rules = ", ".join(sorted(rule.id for rule in broken.counts))
    return Answer(verdict, f"RPEG's resumed run accepted, such a trace refused by {rules}")


def resume(asker: Asker, facts: Mapping[str, Any]) -> Answer:
    """Does a run go on with a plan for another number of GPUs?"""
    from resumed_run import resumes

    with tempfile.TemporaryDirectory() as folder:
        reason = resumes(asker.planner, facts["experiment"], facts["before"], facts["after"], Path(folder))
    return Answer("does not load" if reason else "loads", reason or "as the same plan")


QUESTIONS: dict[str, Callable[[Asker, Mapping[str, Any]], Answer]] = {
    "admits": admits,
    "any plan": any_plan,
    "asynchrony": asynchrony,
    "engine": engine,
    "estimate": estimate,
    "generation ratio": generation_ratio,
    "host": host,
    "later step": later_step,
    "legal": legal,
    "objective": objective,
    "resume": resume,
    "serial reward": serial_reward,
    "shared GPUs": shared_gpus,
    "smaller": smaller,
    "staleness": staleness,
    "together": together,
    "training": training,
    "transfer": transfer,
}
"""What ``ask:`` may be."""
