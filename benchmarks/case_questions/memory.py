"""Questions about memory: of a training, of a generation engine, of a node's host."""

from __future__ import annotations

import attrs
from rpeg_plugin_analytical.engine_memory import Engine, engine_memory
from rpeg_plugin_analytical.host_memory import Offloaded, host_memory

from case_questions.asker import FITS, FULL, GB, Answer, Asker, Facts, with_values
from rpeg_core.costing.batches import MemoryBatch
from rpeg_core.ir import Role
from rpeg_core.passes.score import usable_bytes
from rpeg_core.records import Target
from rpeg_core.spec.execution import Execution, Recompute, Sharding
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.spec.workload import Workload
from rpeg_core.validation.training import layouts_of

__all__ = ["admits", "engine", "estimate", "host", "later_step", "smaller", "training"]


def _training_terms(asker: Asker, facts: Facts, role: Role = Role.TRAINING) -> dict[str, float]:
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


def _execution(given: Facts) -> Execution:
    values = dict(given)
    for key, enumeration in (("recompute", Recompute), ("sharding", Sharding)):
        if key in values:
            values[key] = enumeration(values[key])
    return Execution(**values)


def _limit(asker: Asker, facts: Facts) -> float:
    return usable_bytes(asker.hardware(facts["gpu"], facts.get("memory_gb")).device.memory_bytes)


def training(asker: Asker, facts: Facts) -> Answer:
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


def estimate(asker: Asker, facts: Facts) -> Answer:
    """Is a published estimate of a training's memory met within ``within``?"""
    needed, other = sum(_training_terms(asker, facts).values()), facts["published_gib"] * 2**30
    far = abs(needed / other - 1.0)
    verdict = "agrees" if far <= facts["within"] else "differs"
    return Answer(
        verdict, f"{needed / 2**30:.1f} GiB, published {facts['published_gib']:g} ({needed / other - 1:+.0%})"
    )


def later_step(asker: Asker, facts: Facts) -> Answer:
    """Does a step with the optimizer's state need more than one without, in a pass that also holds ``term``?"""
    terms = _training_terms(asker, facts)
    state, whole = terms["optimizer state"], sum(terms.values())
    verdict = "a later step" if state > 0 and terms[facts["term"]] > 0 else "the first step"
    number = f"{(whole - state) / GB:.1f} without the optimizer's state, {whole / GB:.1f} GB with it"
    return Answer(verdict, f"{number}, {terms[facts['term']] / GB:.1f} of {facts['term']}", whole)


def smaller(asker: Asker, facts: Facts) -> Answer:
    """Which of two layouts needs less, and by how much a term differs."""
    first, second = (_training_terms(asker, with_values(facts, facts[side])) for side in ("first", "second"))
    term, peaks = facts["term"], [sum(first.values()), sum(second.values())]
    name = "first" if peaks[0] <= peaks[1] else "second"
    return Answer(
        facts["names"][name],
        f"{peaks[0] / GB:.1f} → {peaks[1] / GB:.1f} GB, {term} {first[term] / GB:.1f} → {second[term] / GB:.1f} GB",
    )


def engine(asker: Asker, facts: Facts) -> Answer:
    """Do an engine and its weight updates fit a GPU of ``memory_gib``?"""
    memory = facts["memory_gib"] * 2**30
    found = engine_memory(asker.model(facts["model"]), Engine(**facts["engine"]), memory)
    verdict = FITS if found.starts and found.peak <= memory else FULL
    return Answer(verdict, f"{found.peak / 2**30:.1f} of {facts['memory_gib']:g} GiB")


def admits(asker: Asker, facts: Facts) -> Answer:
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


def host(asker: Asker, facts: Facts) -> Answer:
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
