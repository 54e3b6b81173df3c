"""Settings of ``dpo``: what shapes the graph, then what a run computes. Plans do not depend on the latter."""

from __future__ import annotations

import attrs

from rpeg_core import setting
from rpeg_core.runtime.semantics import UpdateSettings

__all__ = ["Settings"]


@attrs.frozen(kw_only=True)
class Settings(UpdateSettings):
    """Settings of ``dpo``."""

    data_bytes_per_element: int | None = setting(
        None,
        help="Width of token ids and log-probabilities; null is workload.bytes_per_element, as in the paper's table "
        "VIII. Backends that move them as int32 and float32 want 4.",
        unit="B",
        allowed=(2, 4),
    )

    beta: float = setting(
        0.1, help="How much departing from the reference costs (Rafailov et al., arXiv:2305.18290; TRL).", minimum=0.0
    )
    label_smoothing: float = setting(
        0.0, help="Probability that a preference is the wrong way round (cDPO; TRL).", minimum=0.0, maximum=0.5
    )
    reference_free: bool = setting(False, help="Take a uniform reference; its log-probabilities are not used.")
