"""From the dimension columns of a measured row to a ModelSpec.

The columns hold layers, hidden, ffn, heads, kv_heads, vocab, head_dim, experts and topk. What they cannot say (ungated
feed-forward networks, shared experts, dense layers, latent attention) is a fact of the architecture and stands in
:data:`FACTS`, from the model's published ``config.json`` or paper. A column of the table overrides nothing but itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import attrs

from rpeg_core.errors import ModelConfigError
from rpeg_core.spec.models import LatentAttention, ModelSpec, MoE
from rpeg_core.validation.rows import Row, Unusable

__all__ = ["FACTS", "Facts", "model_of_row"]


@attrs.frozen(kw_only=True)
class Facts:
    """What the columns cannot say of the models whose name matches ``pattern``."""

    pattern: str
    source: str
    gated: bool = True
    tied: bool = False
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_share: float = 0.0
    dense_ffn: int | None = None
    latent: LatentAttention | None = None
    extra_layers: int = 0


def _latent(q_lora_rank: int | None) -> LatentAttention:
    return LatentAttention(
        q_lora_rank=q_lora_rank, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )


FACTS: tuple[Facts, ...] = (
    Facts(
        pattern=r"deepseek.?v3 \(w/o mtp\)",
        source="deepseek-ai/DeepSeek-V3 config.json, without the multi-token prediction module",
        shared_ffn=2048,
        dense_layers=3,
        dense_ffn=18432,
        latent=_latent(1536),
    ),
    Facts(
        pattern=r"deepseek.?v3",
        source="deepseek-ai/DeepSeek-V3 config.json; its multi-token prediction module is one layer more",
        shared_ffn=2048,
        dense_layers=3,
        dense_ffn=18432,
        latent=_latent(1536),
        extra_layers=1,
    ),
    Facts(
        pattern=r"kimi.?k2",
        source="moonshotai/Kimi-K2-Instruct config.json",
        shared_ffn=2048,
        dense_layers=1,
        dense_ffn=18432,
        latent=_latent(1536),
    ),
    Facts(
        pattern=r"moonlight",
        source="moonshotai/Moonlight-16B-A3B config.json",
        shared_ffn=2816,
        dense_layers=1,
        dense_ffn=11264,
        latent=_latent(None),
    ),
    Facts(
        pattern=r"maverick",
        source="meta-llama/Llama-4-Maverick-17B-128E config.json (interleave_moe_layer_step 2)",
        shared_ffn=8192,
        dense_share=0.5,
        dense_ffn=16384,
    ),
    Facts(pattern=r"gpt.?oss", source="openai/gpt-oss config.json"),
    Facts(pattern=r"^gpt.?j", source="EleutherAI/gpt-j-6b config.json", gated=False),
    Facts(pattern=r"^gpt", source="GPT-3 (arXiv:2005.14165): two projections", gated=False, tied=True),
    Facts(pattern=r"nemotron.?4", source="arXiv:2406.11704: squared ReLU, untied", gated=False),
    Facts(pattern=r"falcon", source="tiiuae/falcon-180B config.json", gated=False, tied=True),
    Facts(pattern=r"qwen(2\.5|3).*\b(0\.6|1\.5|1\.7|3|4)b", source="Qwen config.json: tied embeddings", tied=True),
    Facts(pattern=r"1b-nanotron", source="nanotron bench_cluster: tied embeddings", tied=True),
)


def model_of_row(row: Row) -> ModelSpec:
    """The model of one row.

    Raises:
        Unusable: a dimension is missing or contradicts another.
    """
    name = row.text("model")
    facts = next((f for f in FACTS if re.search(f.pattern, name.lower())), Facts(pattern="", source="columns"))
    layers, hidden, heads = row.whole("layers"), row.whole("hidden"), row.whole("heads")
    ffn = row.whole("ffn")
    values: Mapping[str, object] = {
        "name": name,
        "family": "measured",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": row.whole("kv_heads", default=heads),
        "head_dim": row.whole("head_dim", default=hidden // heads),
        "ffn": ffn,
        "gated_ffn": facts.gated,
        "vocab": row.whole("vocab"),
        "tied_embeddings": facts.tied,
        "source": facts.source,
    }
    try:
        model = ModelSpec(**values)  # type: ignore[arg-type]
        if facts.latent is not None:
            latent = facts.latent
            model = attrs.evolve(model, latent_attention=latent, head_dim=latent.qk_head_dim, kv_heads=heads)
        experts = row.whole("experts", default=0)
        if experts:
            dense = facts.dense_layers or round(facts.dense_share * layers)
            moe = MoE(
                experts=experts,
                active_experts=row.whole("topk"),
                expert_ffn=ffn,
                shared_ffn=facts.shared_ffn,
                dense_layers=dense,
            )
            model = attrs.evolve(model, layers=layers + facts.extra_layers, moe=moe, ffn=facts.dense_ffn or ffn)
    except (ValueError, ModelConfigError) as error:
        raise Unusable(f"its dimensions are no model: {error}") from error
    return model
