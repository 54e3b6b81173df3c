"""Structures: the choices that change the graph itself (paper, A-J2b: ``y = (ac, tau)``, and fusion)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs

__all__ = ["STRUCTURAL_OPTIONS", "Structure", "StructureChoices", "enumerate_structures"]

STRUCTURAL_OPTIONS = ("actor_critic_sharing", "fusion")
"""Structural switches beside staleness; a template lists those it offers."""


@attrs.frozen(kw_only=True)
class Structure:
    """One point of the structural space.

    ``staleness`` holds (model, tau) for every trainable model of the graph, in model order.
    """

    staleness: tuple[tuple[str, int], ...]
    actor_critic_sharing: bool = False
    fusion: bool = False

    def tau(self, model: str) -> int:
        """The staleness budget of a trainable model; 0 when the structure names none."""
        return dict(self.staleness).get(model, 0)

    def __str__(self) -> str:
        taus = {tau for _, tau in self.staleness}
        if not taus:
            tau = "nothing trained"
        elif len(taus) == 1:
            tau = f"staleness {taus.pop()}"
        else:
            tau = "staleness " + ", ".join(f"{model}={value}" for model, value in self.staleness)
        options = [name.replace("_", " ") for name in STRUCTURAL_OPTIONS if getattr(self, name)]
        return ", ".join([tau, *options])


@attrs.frozen(kw_only=True)
class StructureChoices:
    """What the search may choose from (the experiment's ``structure:``)."""

    staleness: tuple[int, ...] = (0,)
    actor_critic_sharing: tuple[bool, ...] = (False,)
    fusion: tuple[bool, ...] = (False,)


def enumerate_structures(
    choices: StructureChoices, trainable: Sequence[str], shared_trainable: Sequence[str] | None
) -> tuple[Structure, ...]:
    """Every structure, in a fixed order: options off first, small staleness first.

    Args:
        choices: the allowed values.
        trainable: trainable models of the separate graph.
        shared_trainable: trainable models with actor-critic sharing, None when the template does not offer it.
    """
    found = []
    for sharing, fusion in itertools.product(sorted(set(choices.actor_critic_sharing)), sorted(set(choices.fusion))):
        models = shared_trainable if sharing else trainable
        if models is None or (sharing and fusion):  # a shared backbone has one training, which fuses with nothing
            continue
        for taus in itertools.product(sorted(set(choices.staleness)), repeat=len(models)):
            found.append(
                Structure(
                    staleness=tuple(zip(models, taus, strict=True)),
                    actor_critic_sharing=sharing,
                    fusion=fusion,
                )
            )
    return tuple(found)
