"""Direct preference optimization: the algorithm ``dpo``, on offline pairs of responses."""

from rpeg_core import AlgorithmTemplate, ModelRole, hookimpl
from rpeg_plugin_dpo.graph import build
from rpeg_plugin_dpo.settings import Settings

__all__ = ["TEMPLATE"]

TEMPLATE = AlgorithmTemplate(
    name="dpo",
    summary="DPO on offline pairs of a chosen and a rejected response; no generation, no reward model.",
    roles=(
        ModelRole(name="actor", trainable=True, head="lm"),
        ModelRole(name="reference", trainable=False, head="lm"),
    ),
    build=build,
    semantics="rpeg_plugin_dpo.semantics:SEMANTICS",
    settings=Settings,
)


@hookimpl
def rpeg_algorithms() -> list[AlgorithmTemplate]:
    """The template of this distribution."""
    return [TEMPLATE]
