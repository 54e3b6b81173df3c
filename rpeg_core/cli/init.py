"""``rpeg init``: write a commented experiment file for an installed algorithm and hardware profile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from rpeg_core.cli import ui
from rpeg_core.cli.context import CommandContext, pass_context
from rpeg_core.errors import ExperimentError, UsageError

if TYPE_CHECKING:
    from rpeg_core.plugins.registry import Registry
    from rpeg_core.records import AlgorithmTemplate, HardwareProfile, ModelRole

__all__ = ["command", "experiment_text"]

ROLLOUTS = (1, 8, 4, 2)
"""Rollouts per prompt: the first that the algorithm accepts."""


@attrs.frozen(kw_only=True)
class _Scale:
    """Sizes that make sense on a cluster, or on the cores of one machine."""

    model: str
    prompts: int
    prompt_tokens: int
    response_tokens: int
    lengths: str
    bytes_per_element: int
    gpus: int


CLUSTER = _Scale(
    model="meta-llama/Llama-3.1-8B",
    prompts=256,
    prompt_tokens=512,
    response_tokens=1024,
    lengths="[[0.5, 256], [0.85, 512], [1.0, 1024]]",
    bytes_per_element=2,
    gpus=16,
)
MACHINE = _Scale(
    model="{layers: 2, hidden: 64, heads: 4, kv_heads: 2, ffn: 128, vocab: 32}",
    prompts=32,
    prompt_tokens=16,
    response_tokens=16,
    lengths="[[0.5, 8], [1.0, 16]]",
    bytes_per_element=4,
    gpus=1,
)

TEXT = """\
# An experiment for `rpeg plan`: what to train, on what, and what the search may choose.
# Without a comment that says otherwise a key may be left out, its default is the value shown.

algorithm: {algorithm}  # required; installed: {algorithms}

# One entry per model of the algorithm. `config` is a public model (`rpeg show model` lists them), the path of a
# config.json, or dimensions {{layers: 32, hidden: 4096, ...}}; `same_as` repeats another entry.
# `head` is lm or scalar; by default what the algorithm needs. `weights: FOLDER` names first weights for a run.
models:  # required
{models}

workload:  # required; one RL step
  prompts: {scale.prompts}  # required; prompts per step, >= 1
  rollouts_per_prompt: {rollouts}  # responses per prompt, >= 1; default 1
  prompt_tokens: {scale.prompt_tokens}  # required; mean length of a prompt
  response_tokens: {scale.response_tokens}  # required; mean length of a response, with response_lengths the longest
  # response_lengths: {scale.lengths}  # this share is finished after so many tokens; or a
  #                                    # CSV file with the columns fraction,tokens
  bytes_per_element: {scale.bytes_per_element}  # 2 (BF16, the default) or 4 (FP32, what CPU cores run)
  shared_prefix: false  # true: the rollouts of a prompt share its prefill

cluster:  # required
  hardware: {hardware}  # required; installed: {profiles}
  racks: 1  # >= 1
  nodes_per_rack: {nodes}  # >= 1
  gpus_per_node: {gpus_per_node}  # by default what the hardware has
  # memory_gb: {memory_gb:g}  # memory of one GPU in 10^9 bytes, instead of the hardware's

# What the search may choose from; the more, the longer it takes.
structure:
  staleness: [0, 1]  # steps that the weights used for generation may lag behind; default [0]
{structures}
objective:
  kind: throughput  # or throughput_x_utilization, or cost_per_token
  max_throughput_loss: 0.1  # what the last two may give up of the best throughput, 0 <= share < 1
  horizon_steps: 8  # steps that are scheduled to predict the throughput
  split_lengths: true  # false: no operator is split by response_lengths

search:
  strategy: {strategy}  # installed: {strategies}
  seconds: 10  # time to search
  # evaluations: 20000  # instead of, or beside, seconds; without seconds a search is reproducible
  seed: 0

# Parts of the plan that you fix; operators: {operators}
# pin:
#   {operator}: {{gpus: "0-{last}"}}  # any of gpus, dp, pp, tp and microbatches

# Further axes that the search may choose from, by role (training, inference, generation) or operator; default: none.
# space:
#   training: {{recompute: [none, full], cp: [1, 2], sequence_parallel: [false, true]}}  # also ep, precision, framework

# Settings of plugins; `rpeg show algorithm {algorithm}` and `rpeg show search {strategy}` list them.
# settings:
#   {strategy}: {{seed: 1}}

# Cost models or single terms, by default the hardware's.
# costs: [{costs}]
"""


@click.command("init")
@click.argument("file", type=click.Path(path_type=Path), default=Path("experiment.yaml"))
@click.option("--algorithm", default="ppo", show_default=True, metavar="NAME", help="An installed algorithm.")
@click.option("--hardware", default="gh200", show_default=True, metavar="NAME", help="An installed hardware profile.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@pass_context
def command(context: CommandContext, file: Path, algorithm: str, hardware: str, force: bool) -> None:
    """Write a commented experiment file to start from (FILE: experiment.yaml).

    The file says what each key means and what is allowed, and plans as it is.
    """
    registry = context.registry
    text = experiment_text(
        template=registry.get("algorithm", algorithm).record,
        profile=registry.get("hardware", hardware).record,
        algorithms=[loaded.name for loaded in registry.records("algorithm")],
        profiles=[loaded.name for loaded in registry.records("hardware")],
        strategies=[loaded.name for loaded in registry.records("search")],
        scale=MACHINE if _measured(registry, hardware) else CLUSTER,
    )
    try:
        with file.open("w" if force else "x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError:
        raise UsageError(f"{file} exists", hint="--force overwrites it") from None
    except OSError as error:
        raise UsageError(f"cannot write {file}", facts=[error.strerror or str(error)]) from error
    ui.print_text(f"{file} written\nnext: rpeg plan {file}")


def experiment_text(
    *,
    template: AlgorithmTemplate,
    profile: HardwareProfile,
    algorithms: Sequence[str],
    profiles: Sequence[str],
    strategies: Sequence[str],
    scale: _Scale = CLUSTER,
) -> str:
    """The commented experiment file."""
    nodes = max(1, scale.gpus // profile.gpus_per_node)
    gpus = nodes * profile.gpus_per_node
    operators = [f"{role.name}_training" for role in template.roles if role.trainable]
    return TEXT.format(
        algorithm=template.name,
        algorithms=", ".join(algorithms),
        models="\n".join(_models(template.roles, scale.model)),
        scale=scale,
        rollouts=_rollouts(template),
        hardware=profile.name,
        profiles=", ".join(profiles),
        nodes=nodes,
        gpus_per_node=profile.gpus_per_node,
        memory_gb=profile.device.memory_bytes / 1e9,
        structures="".join(
            f"  {name}: [false, true]  # let the search try both; default [false]\n" for name in template.structures
        ),
        strategy="annealing",
        strategies=", ".join(strategies) or "none, pip install rpeg-plugin-annealing",
        operators=f"e.g. {', '.join(operators)}; `rpeg plan` names all",
        operator=operators[0] if operators else "OPERATOR",
        last=gpus - 1,
        costs=", ".join(profile.default_costs),
    )


def _measured(registry: Registry, name: str) -> bool:
    """Whether the profile is of this machine."""
    from rpeg_core.records import MeasuredHardware

    return any(
        loaded.name == name and isinstance(loaded.record, MeasuredHardware) for loaded in registry.records("hardware")
    )


def _rollouts(template: AlgorithmTemplate) -> int:
    """Rollouts per prompt that the algorithm works with, as far as one can tell without a model of the user's."""
    from rpeg_core.planning.structures import Structure
    from rpeg_core.spec.models import Head
    from rpeg_core.spec.workload import Workload
    from rpeg_core.testing.toys import toy_model

    models = {role.name: toy_model(role.name).with_head(Head(role.head)) for role in template.roles}
    for rollouts in ROLLOUTS:
        workload = Workload(prompts=16, rollouts_per_prompt=rollouts, prompt_tokens=20, response_tokens=40)
        with contextlib.suppress(ExperimentError):
            template.build(workload, models, Structure(staleness=()), template.settings())
            return rollouts
    return 1


def _models(roles: Sequence[ModelRole], model: str) -> Iterator[str]:
    first: str | None = None
    for role in roles:
        same = first is not None and not role.trainable and role.head == "lm"
        value = f"{{same_as: {first}}}" if same else f"{{config: {model}}}"
        what = "trained" if role.trainable else "frozen"
        optional = "; may be left out where the algorithm's settings say what takes its place" if role.optional else ""
        yield f"  {role.name}: {value}  # {what}, {role.head} head{optional}"
        first = first or (role.name if role.head == "lm" else None)
