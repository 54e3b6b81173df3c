"""What an algorithm computes at run time: the contents of its containers, its advantages, losses and updates.

A template names an object of this protocol, ``AlgorithmTemplate.semantics = "package.module:OBJECT"``. A backend
imports it with :func:`load_semantics`; planning never does, so that only backends need torch. A backend knows no
algorithm by name: what an operator computes follows from its role, its model's head and what its containers hold.

Shapes: N = B*R rows (sequences) of a step lie prompt-major (row = prompt * R + rollout). A rank of data-parallel degree
n holds N/n consecutive rows, whole prompts; Lr is the number of response tokens. Per-token tensors are [rows, Lr],
entry t belongs to response token t, and are 0 where the mask is 0.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

from rpeg_core.errors import BackendError, PluginError
from rpeg_core.ir.graph import ContainerKind, Operator, Rpeg
from rpeg_core.runtime.losses import Aggregation, BeyondCap, KlEstimator
from rpeg_core.settings import setting

if TYPE_CHECKING:
    import torch

    from rpeg_core.records import AlgorithmTemplate
    from rpeg_core.spec.workload import Workload

__all__ = [
    "PROXIMAL_LOGPROBS",
    "Content",
    "Counts",
    "LossParts",
    "ModelOutputs",
    "OptimizerSettings",
    "PolicySettings",
    "Prepared",
    "Recipe",
    "Semantics",
    "UpdateSettings",
    "load_semantics",
    "minibatch_rows",
    "sequences_of",
]


PROXIMAL_LOGPROBS = "proximal_logprobs"
"""Name of the rows that a backend adds where :attr:`Recipe.proximal` asks for them."""


class Content(enum.Enum):
    """What a data container holds at run time. Who makes it is the operator's role and model."""

    PROMPTS = "prompts"
    """Token ids int32 [prompts, Lp], padded on the left; from the dataset."""

    SEQUENCES = "sequences"
    """Token ids int32 [rows, Lp + Lr], prompt and response; made by generation or, for offline data, the dataset."""

    LOGPROBS = "logprobs"
    """float32 [rows, Lr]: of each response token, under the operator's model (generation, or inference with an LM
    head) as it was sampled: at the sampling temperature, before top-k and top-p."""

    VALUES = "values"
    """float32 [rows, Lr]: the scalar head on the state before each response token (inference)."""

    SCORES = "scores"
    """float32 [rows]: the scalar head at the last response token (inference), or the reward of a function."""


@attrs.frozen(kw_only=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with a constant learning rate after a linear warm-up.

    Attributes:
        learning_rate: after the warm-up.
        warmup_steps: optimizer updates over which it rises from ``learning_rate / warmup_steps``; 0 is none.
        beta1, beta2, epsilon, weight_decay: of AdamW; norms and biases are not decayed.
        clip_norm: the gradient's global L2 norm is scaled down to this; 0 is no clipping.
    """

    learning_rate: float
    warmup_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def learning_rate_at(self, update: int) -> float:
        """The rate of optimizer update ``update``, 0-based over the whole run."""
        return self.learning_rate * min(1.0, (update + 1) / max(1, self.warmup_steps))


@attrs.frozen(kw_only=True)
class Recipe:
    """How a training operator uses its rows.

    Attributes:
        optimizer: of the operator's model.
        epochs: passes over the rows of a step.
        minibatches: optimizer updates in a pass, over the rows that :func:`minibatch_rows` says.
        rows_together: this many consecutive rows enter the loss in one microbatch, e.g. the 2 rows of a pair.
        entropy: whether the loss reads :attr:`ModelOutputs.entropy`.
        proximal: whether the loss reads the rows ``PROXIMAL_LOGPROBS``: float32 [rows, Lr], of the model in training
            as it is before the first update of the step.
    """

    optimizer: OptimizerSettings
    epochs: int = 1
    minibatches: int = 1
    rows_together: int = 1
    entropy: bool = False
    proximal: bool = False


@attrs.frozen(kw_only=True)
class UpdateSettings:
    """Settings that every algorithm trained with AdamW has: a base class of the template's settings class.

    Learning rate, weight decay, gradient clipping and the one epoch are the paper's (appendix B, workload
    hyperparameters), the moments' decay rates and epsilon Adam's own (Kingma and Ba, arXiv:1412.6980; verl, TRL).
    """

    learning_rate: float = setting(1e-6, help="Of AdamW, after the warm-up.", minimum=0.0)
    warmup_steps: int = setting(
        0, help="Optimizer updates over which the learning rate rises linearly.", unit="updates", minimum=0
    )
    weight_decay: float = setting(0.0, help="Of AdamW; norms and biases are not decayed.", minimum=0.0)
    gradient_clip: float = setting(
        1.0, help="Largest global L2 norm of the gradient, which is scaled down to it; 0 for any.", minimum=0.0
    )
    adam_beta1: float = setting(0.9, help="Decay rate of AdamW's first moment.", minimum=0.0, maximum=1.0)
    adam_beta2: float = setting(0.999, help="Decay rate of AdamW's second moment.", minimum=0.0, maximum=1.0)
    adam_epsilon: float = setting(1e-8, help="Added to the root of AdamW's second moment.", minimum=0.0)
    epochs: int = setting(1, help="Passes over the sequences of an RL step.", minimum=1)
    minibatches: int = setting(
        1, help="Optimizer updates in an epoch, each on its part of the step's prompts.", minimum=1
    )

    def recipe(
        self,
        *,
        learning_rate: float | None = None,
        rows_together: int = 1,
        entropy: bool = False,
        proximal: bool = False,
    ) -> Recipe:
        """These settings as a :class:`Recipe`; ``learning_rate`` for a model that has a rate of its own."""
        return Recipe(
            optimizer=OptimizerSettings(
                learning_rate=self.learning_rate if learning_rate is None else learning_rate,
                warmup_steps=self.warmup_steps,
                beta1=self.adam_beta1,
                beta2=self.adam_beta2,
                epsilon=self.adam_epsilon,
                weight_decay=self.weight_decay,
                clip_norm=self.gradient_clip,
            ),
            epochs=self.epochs,
            minibatches=self.minibatches,
            rows_together=rows_together,
            entropy=entropy,
            proximal=proximal,
        )


@attrs.frozen(kw_only=True)
class PolicySettings(UpdateSettings):
    """Settings of algorithms that train a policy on what an older version of it may have generated.

    With staleness tau, generation's log-probabilities are those of a version up to tau steps older than the one in
    training. The plain objective takes the ratio to them; the decoupled one keeps the *proximal* policy, the one that
    the step's updates start from, apart from the *behaviour* policy, which generated.
    """

    objective: Literal["plain", "decoupled"] = setting(
        "plain",
        help="plain: the clipped ratio is to the policy that generated; decoupled: it is to the policy before the "
        "step's first update, and each token is weighted by their ratio (AReaL), for structures with staleness.",
    )
    weight_cap: float | None = setting(
        5.0, help="Of decoupled: the largest weight of a token (AReaL); null for any.", minimum=0.0
    )
    weight_beyond_cap: BeyondCap = setting(
        "truncate",
        help="Of decoupled: a larger weight becomes the cap (IMPALA, verl), or the token is left out (AReaL).",
    )
    clip: float = setting(
        0.2, help="How far below 1 the probability ratio counts, and above unless clip_high (paper).", minimum=0.0
    )
    clip_high: float | None = setting(
        None, help="How far above 1 the ratio counts (clip-higher of DAPO, 0.28 there); null is clip.", minimum=0.0
    )
    kl_coefficient: float = setting(0.01, help="Weight of the KL divergence from the reference (paper).", minimum=0.0)
    kl_estimator: KlEstimator = setting(
        "k3",
        help="Of the KL divergence from one sample (joschu.net/blog/kl-approx.html); k3 is DeepSeekMath's, k1 is usual "
        "in rewards.",
    )
    entropy_coefficient: float = setting(0.0, help="Weight of the policy's entropy in the loss (verl).", minimum=0.0)
    aggregation: Aggregation = setting(
        "token-mean", help="How per-token losses become one: see rpeg_core.runtime.losses.mean_over (verl, TRL)."
    )

    @property
    def clip_upper(self) -> float:
        """``clip_high``, or ``clip`` when it is null."""
        return self.clip if self.clip_high is None else self.clip_high

    @property
    def decoupled(self) -> bool:
        """Whether behaviour and proximal policy are told apart."""
        return self.objective == "decoupled"

    @property
    def reads_proximal(self) -> bool:
        """Whether the proximal policy's log-probabilities must be computed before the updates.

        With one update a step they are what the model in training says itself.
        """
        return self.decoupled and self.epochs * self.minibatches > 1


@attrs.frozen(kw_only=True)
class Prepared:
    """What :meth:`Semantics.prepare` makes of a rank's rows.

    Attributes:
        rows: tensors whose first dimension is rows; the loss gets them beside the operator's containers.
        metrics: scalars of the whole batch, equal on all ranks, e.g. the mean reward.
    """

    rows: Mapping[str, torch.Tensor]
    metrics: Mapping[str, torch.Tensor]


@attrs.frozen(kw_only=True)
class ModelOutputs:
    """What the model in training says about a microbatch, with gradients.

    Attributes:
        logprobs: float32 [m, Lr] of the response tokens; None without an LM head.
        values: float32 [m, Lr] of the states before them; None without a scalar head.
        entropy: float32 [m, Lr] of the distributions that they were drawn from; None unless the recipe wants it.
    """

    logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


@attrs.frozen(kw_only=True)
class Counts:
    """The size of a minibatch over all data-parallel ranks: what a loss divides its sums by.

    Attributes:
        rows: sequences.
        tokens: response tokens, i.e. the sum of the mask.
    """

    rows: int
    tokens: int


@attrs.frozen(kw_only=True)
class LossParts:
    """A microbatch's part of a minibatch.

    Attributes:
        loss: scalar with gradient, divided by global counts: the minibatch's loss is its plain *sum* over microbatches
            and data-parallel ranks, and so is the gradient. Nothing depends on how the rows were split.
        metrics: detached scalars that sum up in the same way.
    """

    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor]


@runtime_checkable
class Semantics(Protocol):
    """The run-time side of an algorithm; stateless, and the same for the same arguments.

    A backend runs a training operator like this, once per step::

        recipe = semantics.recipe(operator.name, settings)
        prepared = semantics.prepare(operator.name, rows, mask, total, settings, workload)
        for epoch in range(recipe.epochs):
            for chosen in minibatch_rows(...):                  # one optimizer update
                for microbatch in chosen:                       # forward, loss, backward
                    semantics.loss(operator.name, outputs, rows, mask, counts, settings)

    A fused operator is run like this for each of its ``trainings``, under that training's name.
    """

    contents: Mapping[str, Content]
    """What each data container of its graphs holds, by the container's name."""

    def recipe(self, operator: str, settings: Any) -> Recipe:
        """How the training operator named ``operator`` updates its model."""
        ...

    def prepare(
        self,
        operator: str,
        rows: Mapping[str, torch.Tensor],
        mask: torch.Tensor,
        total: Callable[[torch.Tensor], torch.Tensor],
        settings: Any,
        workload: Workload,
    ) -> Prepared:
        """Advantages, returns and the like, before the first update of a step; without gradients.

        Args:
            operator: the training operator.
            rows: the data containers that it reads, the rows of this rank: whole prompts, all their rollouts.
            mask: bool [rows, Lr], the response tokens up to and including the end-of-sequence token.
            total: sums a tensor, elementwise, over the data-parallel ranks; all of them call it equally often.
            settings: of the algorithm, an instance of the template's class.
            workload: of the experiment; R = ``workload.rollouts_per_prompt``.
        """
        ...

    def loss(
        self,
        operator: str,
        outputs: ModelOutputs,
        rows: Mapping[str, torch.Tensor],
        mask: torch.Tensor,
        counts: Counts,
        settings: Any,
    ) -> LossParts:
        """The loss of a microbatch.

        Args:
            operator: the training operator.
            outputs: of the model in training.
            rows: the microbatch's rows of the operator's data containers and of :attr:`Prepared.rows`.
            mask: bool [m, Lr], as for :meth:`prepare`.
            counts: of the minibatch.
            settings: of the algorithm.
        """
        ...


def load_semantics(template: AlgorithmTemplate) -> Semantics:
    """Import the object that ``template.semantics`` names.

    Raises:
        BackendError: the algorithm has no run-time semantics; it can be planned only.
        PluginError: the name cannot be imported, or is no :class:`Semantics`.
    """
    name = template.semantics
    if name is None:
        raise BackendError(
            f"algorithm {template.name!r} has no run-time semantics",
            facts=["it can be planned and simulated, not executed"],
            hint="see 'Semantics' in docs/algorithms.md",
        )
    module, _, attribute = name.partition(":")
    where = f"semantics of algorithm {template.name!r}: {name!r}"
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginError(
            f"{where} cannot be imported",
            facts=[f"{type(error).__name__}: {error}", "allowed: package.module:OBJECT"],
        ) from error
    if not isinstance(found, Semantics):
        wanted = ("contents", "recipe", "prepare", "loss")
        missing = ", ".join(member for member in wanted if not hasattr(found, member))
        raise PluginError(f"{where} is no rpeg_core.runtime.semantics.Semantics", facts=[f"it lacks: {missing}"])
    return found


def minibatch_rows(
    prompts: int, rollouts_per_prompt: int, minibatches: int, *, first_prompt: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Which of a rank's rows each minibatch has: prompt p of the step is in minibatch p mod ``minibatches``.

    So a minibatch has the same rows whatever the data-parallel degree, and as many on each rank.

    Args:
        prompts: of this rank.
        rollouts_per_prompt: R, rows of each.
        minibatches: how many.
        first_prompt: index in the step of the rank's first prompt.

    Returns:
        For each minibatch the rank's row numbers, ascending.

    Raises:
        BackendError: the rank's prompts cannot be divided into that many minibatches.
    """
    if prompts % minibatches:
        raise BackendError(
            f"{minibatches} minibatches of {prompts} prompts on each data-parallel rank",
            facts=["allowed: a number of minibatches that divides the prompts of a rank"],
            hint="change workload.prompts, the algorithm's setting minibatches, or the data-parallel degree",
        )
    members: list[list[int]] = [[] for _ in range(minibatches)]
    for prompt in range(prompts):
        first = prompt * rollouts_per_prompt
        members[(first_prompt + prompt) % minibatches].extend(range(first, first + rollouts_per_prompt))
    return tuple(map(tuple, members))


def sequences_of(graph: Rpeg, operator: Operator, contents: Mapping[str, Content]) -> str:
    """The container with the token sequences that an inference or training operator runs its model on.

    Raises:
        PluginError: it reads none or several.
    """
    found = sorted(
        name
        for name in operator.inputs
        if graph.container(name).kind is ContainerKind.DATA and contents.get(name) is Content.SEQUENCES
    )
    if len(found) != 1:
        raise PluginError(
            f"operator {operator.name!r} reads {len(found)} containers of token sequences",
            facts=[f"found: {', '.join(found) or 'none'}", "allowed: exactly one"],
        )
    return found[0]
