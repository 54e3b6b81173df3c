"""Algorithm templates: the graph is well-formed for everything offered, and the same each time it is built."""

from __future__ import annotations

import hashlib
import itertools
import types
from collections.abc import Iterator, Mapping

import attrs

from rpeg_core.errors import ExperimentError
from rpeg_core.ir import Role, Rpeg, from_dict, from_text, to_dict, to_text, violations
from rpeg_core.planning.structures import STRUCTURAL_OPTIONS, Structure, StructureChoices, enumerate_structures
from rpeg_core.records import AlgorithmTemplate, ModelRole
from rpeg_core.spec.models import Head, ModelSpec
from rpeg_core.spec.workload import Workload
from rpeg_core.testing.checks import semantics
from rpeg_core.testing.checks.common import defaults
from rpeg_core.testing.checks.outcome import CheckFailedError, RecordCheck, require
from rpeg_core.testing.checks.process import in_new_process
from rpeg_core.testing.toys import toy_model

__all__ = ["CHECKS"]

ROLLOUTS = (1, 2, 4, 8)
"""Rollouts per prompt that are tried; a template may refuse some with an ExperimentError, not all."""

HASH_SEEDS = (1, 2)


@attrs.frozen(kw_only=True)
class _Case:
    """Arguments of ``build`` and what it returned."""

    workload: Workload
    models: Mapping[str, ModelSpec]
    structure: Structure
    graph: Rpeg

    def __str__(self) -> str:
        return _where(self.workload, self.models, self.structure)


def builds(record: AlgorithmTemplate) -> None:
    """A well-formed graph that trains something, for every structure and set of models that it accepts."""
    require([f"{name!r} in structures is no structural option" for name in _unknown(record)])
    for case in _cases(record):
        if not isinstance(case.graph, Rpeg):
            raise CheckFailedError(f"build returned {type(case.graph).__name__}, not Rpeg, for {case}")
        require([f"{rule} (for {case})" for rule in violations(case.graph)])
        if not any(operator.role is Role.TRAINING for operator in case.graph.operators):
            raise CheckFailedError(f"no operator trains anything, for {case}")


def roles(record: AlgorithmTemplate) -> None:
    """Every model that it is given is used, and trained as its role says."""
    problems = {}
    for case in _cases(record):
        if any(getattr(case.structure, option) for option in STRUCTURAL_OPTIONS):
            continue  # these may merge models
        for role in (role for role in record.roles if role.name in case.models):
            problems |= dict.fromkeys(_role_problems(role, case))
    require(list(problems))


def _role_problems(role: ModelRole, case: _Case) -> Iterator[str]:
    using = [model for model in case.graph.models if model.spec.name == case.models[role.name].name]
    if not any(model.name in operator.models for operator in case.graph.operators for model in using):
        yield f"no operator uses the model of role {role.name!r}"
    for model in using:
        if model.trainable != role.trainable:
            yield f"role {role.name!r} has trainable={role.trainable}, its model {model.name!r} {model.trainable}"


def staleness(record: AlgorithmTemplate) -> None:
    """Each trainable model has the staleness budget of the structure."""
    require(
        [
            f"the staleness of {model.name!r} is {model.staleness}, not {case.structure.tau(model.name)}, for {case}"
            for case in _cases(record)
            for model in case.graph.models
            if model.trainable and model.staleness != case.structure.tau(model.name)
        ]
    )


def text_form(record: AlgorithmTemplate) -> None:
    """The text form reads back to an equal graph."""
    require([f"differs after text, for {c}" for c in _cases(record) if from_text(to_text(c.graph)) != c.graph])


def json_form(record: AlgorithmTemplate) -> None:
    """The JSON form reads back to an equal graph."""
    require([f"differs after JSON, for {c}" for c in _cases(record) if from_dict(to_dict(c.graph)) != c.graph])


def repeatable(record: AlgorithmTemplate) -> None:
    """The same arguments give the same graph, also with the models in another order."""
    problems = []
    for case in _cases(record):
        if _build(record, case.workload, case.models, case.structure) != case.graph:
            problems.append(f"building twice gives two graphs, for {case}")
        reordered = dict(reversed(case.models.items()))
        if _build(record, case.workload, reordered, case.structure) != case.graph:
            problems.append(f"the graph depends on the order of the models, for {case}")
    require(problems)


def hash_order(record: AlgorithmTemplate) -> None:
    """Processes with other hash seeds build the same graphs."""
    here = digest(record)
    if any(in_new_process(digest, record, hash_seed=seed) != here for seed in HASH_SEEDS):
        raise CheckFailedError("the graph depends on the order of a set or of hashes")


def digest(record: AlgorithmTemplate) -> str:
    """One hash of all graphs, their order included."""
    return hashlib.sha256("\n".join(to_text(case.graph) for case in _cases(record)).encode()).hexdigest()


def run_time(record: AlgorithmTemplate) -> None:
    """The run-time semantics fit every graph."""
    semantics.fits(record, (case.graph for case in _cases(record)))


CHECKS: tuple[RecordCheck, ...] = (
    ("builds", builds),
    ("roles", roles),
    ("staleness", staleness),
    ("text-form", text_form),
    ("json-form", json_form),
    ("repeatable", repeatable),
    ("hash-order", hash_order),
    ("semantics", run_time),
)


def _cases(record: AlgorithmTemplate) -> Iterator[_Case]:
    """Every accepted workload and set of models with every structure.

    Raises:
        CheckFailedError: a structure is always refused, or something else than ExperimentError is raised.
    """
    refusals: dict[Structure, str] = {}
    accepted: set[Structure] = set()
    for workload, models in _inputs(record):
        for structure in _structures(record, workload, models, refusals):
            try:
                graph = _build(record, workload, models, structure)
            except ExperimentError as error:
                refusals[structure] = error.what
                continue
            accepted.add(structure)
            yield _Case(workload=workload, models=models, structure=structure, graph=graph)
    require(
        [f"{structure} is always refused: {refusals[structure]}" for structure in refusals if structure not in accepted]
    )


def _inputs(record: AlgorithmTemplate) -> Iterator[tuple[Workload, Mapping[str, ModelSpec]]]:
    optional = [role for role in record.roles if role.optional]
    for rollouts in ROLLOUTS:
        workload = Workload(prompts=16, rollouts_per_prompt=rollouts, prompt_tokens=20, response_tokens=40)
        for given in itertools.product((True, False), repeat=len(optional)):
            left_out = {role.name for role, there in zip(optional, given, strict=True) if not there}
            models = {
                role.name: toy_model(role.name).with_head(Head(role.head))
                for role in record.roles
                if role.name not in left_out
            }
            yield workload, models


def _structures(
    record: AlgorithmTemplate,
    workload: Workload,
    models: Mapping[str, ModelSpec],
    refusals: dict[Structure, str],
) -> tuple[Structure, ...]:
    """As the planner enumerates them: graphs without staleness say which models are trainable."""

    def trainable(structure: Structure) -> tuple[str, ...] | None:
        try:
            return tuple(model.name for model in _build(record, workload, models, structure).models if model.trainable)
        except ExperimentError as error:
            refusals[structure] = error.what
            return None

    def values(option: str) -> tuple[bool, ...]:
        return (False, True) if option in record.structures else (False,)

    separate = trainable(Structure(staleness=()))
    if separate is None:
        return ()
    sharing = values("actor_critic_sharing")
    choices = StructureChoices(staleness=(0, 1), actor_critic_sharing=sharing, fusion=values("fusion"))
    shared = trainable(Structure(staleness=(), actor_critic_sharing=True)) if True in sharing else None
    found = enumerate_structures(choices, separate, shared)
    return (Structure(staleness=()), *found)


def _build(
    record: AlgorithmTemplate, workload: Workload, models: Mapping[str, ModelSpec], structure: Structure
) -> Rpeg:
    try:
        return record.build(workload, types.MappingProxyType(models), structure, defaults(record))
    except ExperimentError:
        raise
    except Exception as error:
        what = f"build raised {type(error).__name__}: {error} for {_where(workload, models, structure)}"
        raise CheckFailedError(what) from error


def _where(workload: Workload, models: Mapping[str, ModelSpec], structure: Structure) -> str:
    return f"{structure}, rollouts_per_prompt {workload.rollouts_per_prompt}, models {', '.join(models)}"


def _unknown(record: AlgorithmTemplate) -> list[str]:
    return [name for name in record.structures if name not in STRUCTURAL_OPTIONS]
