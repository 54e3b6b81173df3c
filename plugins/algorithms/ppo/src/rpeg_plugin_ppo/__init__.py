"""Proximal policy optimization: the algorithm ``ppo``, actor and critic separate or with one backbone."""

from rpeg_core import AlgorithmTemplate, ModelRole, hookimpl
from rpeg_plugin_ppo.graph import Settings, build

__all__ = ["TEMPLATE"]

TEMPLATE = AlgorithmTemplate(
    name="ppo",
    summary="PPO with a critic, a reward model and a reference model.",
    roles=(
        ModelRole(name="actor", trainable=True, head="lm"),
        ModelRole(name="critic", trainable=True, head="scalar"),
        ModelRole(name="reward", trainable=False, head="scalar"),
        ModelRole(name="reference", trainable=False, head="lm"),
    ),
    build=build,
    structures=("actor_critic_sharing",),
    settings=Settings,
)


@hookimpl
def rpeg_algorithms() -> list[AlgorithmTemplate]:
    """The template of this distribution."""
    return [TEMPLATE]
