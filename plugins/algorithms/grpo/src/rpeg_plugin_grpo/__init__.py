"""Group relative policy optimization: the algorithm ``grpo``, with a reward model or a reward function."""

from rpeg_core import AlgorithmTemplate, ModelRole, hookimpl
from rpeg_plugin_grpo.graph import build
from rpeg_plugin_grpo.settings import Settings

__all__ = ["TEMPLATE"]

TEMPLATE = AlgorithmTemplate(
    name="grpo",
    summary="GRPO: advantages relative to the group of a prompt's rollouts, no critic.",
    roles=(
        ModelRole(name="actor", trainable=True, head="lm"),
        ModelRole(name="reward", trainable=False, head="scalar", optional=True),
        ModelRole(name="reference", trainable=False, head="lm"),
    ),
    build=build,
    semantics="rpeg_plugin_grpo.semantics:SEMANTICS",
    settings=Settings,
)


@hookimpl
def rpeg_algorithms() -> list[AlgorithmTemplate]:
    """The template of this distribution."""
    return [TEMPLATE]
