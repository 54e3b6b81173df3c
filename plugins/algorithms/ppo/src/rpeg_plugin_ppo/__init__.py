"""Proximal policy optimization: the algorithm ``ppo``, actor and critic separate or with one backbone."""

from rpeg_core import AlgorithmTemplate, ModelRole, hookimpl
from rpeg_plugin_ppo.graph import build
from rpeg_plugin_ppo.settings import Settings

__all__ = ["TEMPLATE"]

TEMPLATE = AlgorithmTemplate(
    name="ppo",
    summary="PPO with a critic, a reference model, and a reward model or function.",
    roles=(
        ModelRole(name="actor", trainable=True, head="lm"),
        ModelRole(name="critic", trainable=True, head="scalar"),
        ModelRole(name="reward", trainable=False, head="scalar", optional=True),
        ModelRole(name="reference", trainable=False, head="lm"),
    ),
    build=build,
    structures=("actor_critic_sharing", "fusion"),
    semantics="rpeg_plugin_ppo.semantics:SEMANTICS",
    settings=Settings,
)


@hookimpl
def rpeg_algorithms() -> list[AlgorithmTemplate]:
    """The template of this distribution."""
    return [TEMPLATE]
