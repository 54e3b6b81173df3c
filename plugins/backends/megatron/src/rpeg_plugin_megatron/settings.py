"""Settings of the backend: ``settings: megatron:`` of the experiment, or ``--set megatron.KEY=VALUE``."""

from __future__ import annotations

from typing import Literal

import attrs

from rpeg_core.errors import SettingsError
from rpeg_core.settings import setting

__all__ = ["Sampling", "Settings"]


@attrs.frozen(kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: only the k most likely tokens may be chosen; 0 means all. Ties with the k-th stay.
        top_p: only the smallest set of most likely tokens whose probability reaches top_p, after top_k; 1 means all.

    Raises:
        SettingsError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __attrs_post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise SettingsError(f"temperature is {self.temperature!r}", facts=["allowed: a finite number, at least 0"])
        if self.top_k < 0:
            raise SettingsError(f"top_k is {self.top_k!r}", facts=["allowed: an integer of at least 0 (0: all tokens)"])
        if not 0.0 < self.top_p <= 1.0:
            raise SettingsError(f"top_p is {self.top_p!r}", facts=["allowed: a number in (0, 1]"])

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0

    @property
    def logprob_temperature(self) -> float:
        """The temperature of all log-probabilities of a run: of sampled tokens, and teacher-forced."""
        return 1.0 if self.greedy else self.temperature


@attrs.frozen(kw_only=True)
class Settings:
    """Settings of the backend ``megatron``.

    Raises:
        ValueError: both data and a task are given, or the sampling is out of range.
    """

    steps: int = setting(8, help="RL steps to run when the command names no number.", minimum=1)
    seed: int = setting(0, help="Seed of initial weights, row order and sampling.", minimum=0)

    data: str | None = setting(None, help="JSONL file of prompts (or, for DPO, of preference pairs).")
    task: str | None = setting(None, help="Built-in generated task instead of data: copy, reverse or sort.")
    tokenizer: str = setting("characters", help="Hugging Face folder with tokenizer.json, or `characters[:ALPHABET]`.")
    chat_template: bool = setting(False, help="Wrap prompts in the chat template of the tokenizer's folder.")
    reward: str | None = setting(
        None, help="Function that scores a response, `package.module:name`; a task brings its own."
    )

    temperature: float = setting(1.0, help="Of sampling; 0 takes the most likely token.", minimum=0.0)
    top_p: float = setting(
        1.0, help="Sample from the smallest set of tokens with this probability.", minimum=0.0, maximum=1.0
    )
    top_k: int = setting(0, help="Sample from this many most likely tokens; 0 for all.", minimum=0)

    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", help="Where workers compute; auto is cuda where there is one."
    )
    precision: Literal["auto", "fp32", "bf16"] = setting(
        "auto", help="Of weights; auto is fp32 on cpu and bf16 on cuda."
    )
    threads_per_worker: int = setting(1, help="CPU threads of torch in every worker.", minimum=1)
    recompute: Literal["none", "full"] = setting(
        "none", help="Recompute activations in the backward pass of trainings whose plan does not say."
    )

    checkpoint_every: int = setting(0, help="Write a checkpoint after every this many RL steps; 0 for none.", minimum=0)
    checkpoints_kept: int = setting(2, help="Older checkpoints are deleted.", minimum=1)
    export: bool = setting(True, help="Write trained models as Hugging Face folders at the end.")

    launcher: Literal["local", "external"] = setting(
        "local", help="Who starts the workers: this command, or torchrun, srun and the like."
    )
    listen: str = setting(
        "127.0.0.1:0", help="HOST:PORT where the controller of external workers listens; port 0 is any."
    )
    oversubscribe: bool = setting(
        False, help="Start workers although they are too many for the cores or the memory of this machine."
    )
    setup_timeout_s: float = setting(300.0, help="Until all workers are ready.", unit="s", minimum=0.1)
    node_timeout_s: float = setting(1800.0, help="The longest that a node may run.", unit="s", minimum=0.1)
    heartbeat_timeout_s: float = setting(
        10.0, help="A worker that is silent for so long is lost.", unit="s", minimum=0.1
    )

    def __attrs_post_init__(self) -> None:
        if self.data is not None and self.task is not None:
            raise ValueError("data and task are both given; name one of them")
        try:
            _ = self.sampling
        except SettingsError as error:
            raise ValueError("; ".join([error.what, *error.facts])) from error

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
