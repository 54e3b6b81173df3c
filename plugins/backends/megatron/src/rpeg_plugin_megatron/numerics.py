"""What a forward pass needs to know and a ModelSpec, which only counts, does not say.

The defaults are those of ``transformers.LlamaConfig``; a model that comes from a Hugging Face folder takes all of them
from its ``config.json``. No torch in this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rpeg_core.errors import ModelConfigError

__all__ = ["Llama3Scaling", "Numerics"]

_GATED_SILU = ("silu", "swish")


@attrs.frozen(kw_only=True)
class Llama3Scaling:
    """Llama 3.1's change of the rotary frequencies for long contexts (``rope_type: llama3`` in config.json).

    Frequencies whose wavelength is above ``original_positions / low_frequency_factor`` are divided by ``factor``,
    those below ``original_positions / high_frequency_factor`` are kept, the ones between are interpolated.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


@attrs.frozen(kw_only=True)
class Numerics:
    """Constants of the forward pass.

    Attributes:
        rotary_base: theta of the rotary embedding.
        rotary_scaling: None, a factor that divides all frequencies (``rope_type: linear``), or Llama 3.1's scaling.
        norm_epsilon: what RMSNorm adds to the mean square.
    """

    rotary_base: float = 10000.0
    rotary_scaling: float | Llama3Scaling | None = None
    norm_epsilon: float = 1e-6

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str) -> Numerics:
        """The constants that a Hugging Face ``config.json`` gives, in the spelling of transformers 4 or 5.

        Args:
            config: the parsed JSON object.
            source: the file, for errors.

        Raises:
            ModelConfigError: the activation, the rotary scaling or a sliding window is one that is not supported.
        """
        activation = config.get("hidden_act", "silu")
        if activation not in _GATED_SILU:
            raise _unsupported(source, "hidden_act", activation, " or ".join(_GATED_SILU))
        # Qwen2 configs carry a window that `use_sliding_window: false` turns off; Mistral's key alone turns it on.
        if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
            raise _unsupported(source, "sliding_window", config["sliding_window"], "null: attention over all positions")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        return cls(
            rotary_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rotary_scaling=_scaling(rope, source),
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        )

    def to_config(self) -> dict[str, Any]:
        """The keys of ``config.json`` that `from_config` reads; its inverse."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rotary_base}
        if isinstance(self.rotary_scaling, Llama3Scaling):
            rope |= {
                "rope_type": "llama3",
                "factor": self.rotary_scaling.factor,
                "low_freq_factor": self.rotary_scaling.low_frequency_factor,
                "high_freq_factor": self.rotary_scaling.high_frequency_factor,
                "original_max_position_embeddings": self.rotary_scaling.original_positions,
            }
        elif self.rotary_scaling is not None:
            rope |= {"rope_type": "linear", "factor": self.rotary_scaling}
        legacy = {key: value for key, value in rope.items() if key != "rope_theta"}
        return {
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_epsilon,
            "rope_parameters": rope,
            # transformers 4 reads these two instead of rope_parameters.
            "rope_theta": self.rotary_base,
            "rope_scaling": None if self.rotary_scaling is None else legacy,
        }


def _scaling(rope: Mapping[str, Any], source: str) -> float | Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return float(rope["factor"])
    if kind == "llama3":
        return Llama3Scaling(
            factor=float(rope["factor"]),
            low_frequency_factor=float(rope["low_freq_factor"]),
            high_frequency_factor=float(rope["high_freq_factor"]),
            original_positions=int(rope["original_max_position_embeddings"]),
        )
    raise _unsupported(source, "rope_type", kind, "default, linear, llama3")


def _unsupported(source: str, key: str, value: object, allowed: str) -> ModelConfigError:
    return ModelConfigError(f"{key} is {value!r}", facts=[f"config: {source}", f"allowed: {allowed}"])
