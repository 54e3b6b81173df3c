"""Settings of the backend: ``settings: megatron:`` of the experiment, or ``--set megatron.KEY=VALUE``."""

from __future__ import annotations

from typing import Literal

import attrs

from rpeg_core.settings import setting

__all__ = ["Settings"]


@attrs.frozen(kw_only=True)
class Settings:
    """Settings of the backend ``megatron``.

    Raises:
        ValueError: both data and a task are given.
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
    setup_timeout_s: float = setting(300.0, help="Until all workers are ready.", unit="s", minimum=0.1)
    node_timeout_s: float = setting(1800.0, help="The longest that a node may run.", unit="s", minimum=0.1)
    heartbeat_timeout_s: float = setting(
        10.0, help="A worker that is silent for so long is lost.", unit="s", minimum=0.1
    )

    def __attrs_post_init__(self) -> None:
        if self.data is not None and self.task is not None:
            raise ValueError("data and task are both given; name one of them")
