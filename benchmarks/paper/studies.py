"""The paper's planner experiments as experiments of ours (paper, Appendix B; model.md, section 7).

The paper prints neither its calibrated hardware numbers nor its cluster shapes below 64 GPUs, so absolute tokens/s
differ and only ratios and shapes compare. Choices made here: four GPUs per node and, as its Table X has it, at most 8
nodes per rack up to 64 GPUs and 16 beyond; 34B is CodeLlama-34B, the only public Llama-2 model of that size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import attrs

from rpeg_core.planning.planner import Planner
from rpeg_core.planning.search import Progress, SearchResult
from rpeg_core.plugins.registry import Registry
from rpeg_core.spec.experiment import Experiment, parse_experiment

MODELS = {
    7: "meta-llama/Llama-2-7b-hf",
    13: "meta-llama/Llama-2-13b-hf",
    34: "codellama/CodeLlama-34b-hf",
    70: "meta-llama/Llama-2-70b-hf",
    175: "openai/gpt-3-175b",
}

TOPOLOGY = {
    8: (1, 2),
    16: (1, 4),
    32: (1, 8),
    64: (2, 8),
    128: (2, 16),
    256: (4, 16),
    512: (8, 16),
    1024: (16, 16),
}
"""GPUs -> (racks, nodes per rack), four GPUs per node."""

PHASES = ((0.50, 4), (0.85, 2), (1.0, 1))
"""Completion fractions and the divisor of Lr at which they are reached (paper, Appendix B)."""

HBM_GB = 102
"""The analytical studies' memory per GH200 (model.md, section 7)."""


@attrs.frozen(kw_only=True)
class Case:
    """One planning problem of the paper: actor, critic and reward sizes in 10^9 parameters."""

    label: str
    gpus: int
    actor: int
    critic: int
    reward: int
    prompts: int
    prompt_tokens: int
    response_tokens: int
    memory_gb: float = HBM_GB
    racks_nodes: tuple[int, int] | None = None
    gpus_per_node: int = 4


def experiment(
    case: Case,
    *,
    costs: str,
    seconds: float,
    objective: str = "throughput",
    staleness: Iterable[int] = (1,),
    seed: int = 0,
    split_lengths: bool = True,
    settings: dict[str, dict[str, Any]] | None = None,
    evaluations: int | None = None,
) -> Experiment:
    """The case as an experiment: PPO, K=8, tau=1, three length phases."""
    racks, nodes = case.racks_nodes or TOPOLOGY[case.gpus]
    lengths = [[fraction, case.response_tokens // divisor] for fraction, divisor in PHASES]
    return parse_experiment(
        {
            "algorithm": "ppo",
            "models": {
                "actor": {"config": MODELS[case.actor]},
                "critic": {"config": MODELS[case.critic]},
                "reward": {"config": MODELS[case.reward]},
                "reference": {"same_as": "actor"},
            },
            "workload": {
                "prompts": case.prompts,
                "prompt_tokens": case.prompt_tokens,
                "response_tokens": case.response_tokens,
                "response_lengths": lengths,
            },
            "cluster": {
                "hardware": "gh200",
                "racks": racks,
                "nodes_per_rack": nodes,
                "gpus_per_node": case.gpus_per_node,
                "memory_gb": case.memory_gb,
            },
            "structure": {"staleness": list(staleness)},
            "objective": {"kind": objective, "horizon_steps": 8, "split_lengths": split_lengths},
            "search": {
                "seconds": seconds,
                "seed": seed,
                **({"evaluations": evaluations} if evaluations else {}),
            },
            "costs": [costs],
            "settings": settings or {},
        }
    )


def solve(chosen: Experiment, strategy: str | None = None) -> SearchResult:
    """Search one experiment with the installed plugins."""
    planner = Planner(chosen, Registry())
    return planner.search(planner.problem(), Progress(), strategy)


def each(function: Callable[[Any], Any], tasks: list[Any], workers: int | None = None) -> list[Any]:
    """``function`` over ``tasks`` on all cores, in order."""
    with ProcessPoolExecutor(workers or os.cpu_count()) as pool:
        return list(pool.map(function, tasks))


def weak_scaling_cases() -> list[Case]:
    """The 36 cases: three sweeps, four sizes, three workloads."""
    sizes = (7, 13, 34, 70)
    sweeps = {
        "actor": [(gpus, size, 7, 7) for gpus, size in zip((8, 16, 32, 64), sizes, strict=True)],
        "critic/reward": [(gpus, 7, size, size) for gpus, size in zip((8, 16, 32, 64), sizes, strict=True)],
        "joint": [
            (gpus, size, size, reward)
            for gpus, size, reward in zip((16, 32, 64, 128), sizes, (7, 7, 13, 13), strict=True)
        ],
    }
    return [
        Case(
            label=name,
            gpus=gpus,
            actor=actor,
            critic=critic,
            reward=reward,
            prompts=prompts,
            prompt_tokens=128,
            response_tokens=response,
        )
        for name, points in sweeps.items()
        for prompts, response in ((512, 128), (256, 384), (128, 896))
        for gpus, actor, critic, reward in points
    ]


def strong_scaling_cases() -> list[Case]:
    """13B everywhere, B=1024, 128/384, 8 to 128 GPUs."""
    return [
        Case(
            label="strong",
            gpus=gpus,
            actor=13,
            critic=13,
            reward=13,
            prompts=1024,
            prompt_tokens=128,
            response_tokens=384,
        )
        for gpus in (8, 16, 32, 64, 128)
    ]


def stability_cases() -> list[Case]:
    """Different sizes for actor, critic and reward, 128/384, 64 to 1024 GPUs (paper, appendix B, figure 12)."""
    sizes = {
        64: (13, 13, 7, 1024),
        128: (34, 13, 13, 1024),
        256: (70, 34, 13, 1024),
        512: (70, 70, 34, 2048),
        1024: (175, 70, 34, 2048),
    }
    return [
        Case(
            label="stability",
            gpus=gpus,
            actor=actor,
            critic=critic,
            reward=reward,
            prompts=prompts,
            prompt_tokens=128,
            response_tokens=384,
        )
        for gpus, (actor, critic, reward, prompts) in sizes.items()
    ]
