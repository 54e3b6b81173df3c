"""ModelSpec: the dimensions of a decoder-only transformer, and what follows from them.

Everything a cost or memory term asks about a model is a count derived here from its real matrices:
attention (multi-head, grouped-query, latent), feed-forward (plain, gated, mixture of experts), embeddings
(tied or not), head, biases and norms. The paper's W_layer = 4 d^2 + 2 d d_ff is the special case of
multi-head attention with two feed-forward projections (model.md, section 3). `total_parameters` equals the
published counts.

Widths are in elements and counts in parameters (scalars), never bytes, unless the name says so.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

import attrs

from rpeg_core.errors import ModelConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Head", "LatentAttention", "MoE", "ModelSpec", "Norm"]

T = TypeVar("T")


class Head(enum.Enum):
    """What maps the last hidden state to the model's output."""

    LM = "lm"
    SCALAR = "scalar"
    LM_AND_SCALAR = "lm+scalar"


class Norm(enum.Enum):
    """Kind of normalization: RMSNorm has a scale, LayerNorm a scale and a shift."""

    RMS = "rmsnorm"
    LAYER = "layernorm"

    @property
    def parameters_per_element(self) -> int:
        """Parameters per normalized element: 1 (scale) or 2 (scale and shift)."""
        return 1 if self is Norm.RMS else 2


def _whole(minimum: int) -> Any:
    """A validator: the value is an int (not a bool) of at least ``minimum``."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            what = f"{_owner(instance)}: {attribute.name} is {value!r}"
            raise ModelConfigError(what, facts=[f"allowed: an integer >= {minimum}"])

    return check


def _typed(*kinds: type) -> Any:
    """A validator: the value is an instance of one of ``kinds`` (None included as ``type(None)``)."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, kinds):
            what = f"{_owner(instance)}: {attribute.name} is {value!r}"
            raise ModelConfigError(what, facts=[f"allowed: {' or '.join(kind.__name__ for kind in kinds)}"])

    return check


def _owner(instance: object) -> str:
    name = getattr(instance, "name", None)
    return f"model {name!r}" if name is not None else type(instance).__name__


def _positive() -> Any:
    return attrs.field(validator=_whole(1))


def _flag(default: bool = False) -> Any:
    return attrs.field(default=default, validator=_typed(bool))


@attrs.frozen(kw_only=True, slots=True)
class MoE:
    """A mixture of experts in place of the dense feed-forward network.

    Every MoE layer has a router of ``experts * hidden`` parameters, ``experts`` feed-forward networks of
    width ``expert_ffn`` of which a token meets ``active_experts``, and shared experts that every token meets.
    """

    experts: int = _positive()
    active_experts: int = _positive()
    expert_ffn: int = _positive()
    #: Total width of the shared experts, 0 if there are none.
    shared_ffn: int = attrs.field(default=0, validator=_whole(0))
    #: Layers that have the model's dense feed-forward network instead of experts.
    dense_layers: int = attrs.field(default=0, validator=_whole(0))
    #: The shared expert's output is scaled by a learned gate of ``hidden`` parameters (qwen2_moe).
    shared_gate: bool = _flag()
    #: The router has one learned correction per expert (deepseek_v3).
    router_bias: bool = _flag()

    def __attrs_post_init__(self) -> None:
        if self.active_experts > self.experts:
            raise ModelConfigError(f"MoE: active_experts is {self.active_experts} but there are {self.experts} experts")
        if self.shared_gate and not self.shared_ffn:
            raise ModelConfigError("MoE: shared_gate is set but shared_ffn is 0")


@attrs.frozen(kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): K and V come from a cached latent."""

    #: Rank of the query's down-projection; None when queries are projected directly.
    q_lora_rank: int | None = attrs.field(validator=attrs.validators.optional(_whole(1)))
    kv_lora_rank: int = _positive()
    qk_nope_head_dim: int = _positive()
    qk_rope_head_dim: int = _positive()
    v_head_dim: int = _positive()

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_elements(self) -> int:
        """Elements cached per token and layer: the latent and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@attrs.frozen(kw_only=True, slots=True)
class ModelSpec:
    """The dimensions of one model.

    Raises:
        ModelConfigError: a dimension is not a positive integer, or dimensions contradict each other.
    """

    name: str = attrs.field(validator=_typed(str))
    family: str = attrs.field(validator=_typed(str))
    layers: int = _positive()
    #: d, the width of the residual stream.
    hidden: int = _positive()
    heads: int = _positive()
    kv_heads: int = _positive()
    #: Width of one head; with latent attention, of one query or key head.
    head_dim: int = _positive()
    #: d_ff of the dense feed-forward network; with MoE used by its dense layers only.
    ffn: int = _positive()
    #: Three projections (gate, up, down) instead of two.
    gated_ffn: bool = attrs.field(validator=_typed(bool))
    #: V, rows of the embedding matrix as stored (padding included).
    vocab: int = _positive()
    #: The LM head shares the embedding's matrix.
    tied_embeddings: bool = attrs.field(validator=_typed(bool))
    head: Head = attrs.field(default=Head.LM, validator=_typed(Head))
    moe: MoE | None = attrs.field(default=None, validator=_typed(MoE, type(None)))
    latent_attention: LatentAttention | None = attrs.field(default=None, validator=_typed(LatentAttention, type(None)))
    #: Learned position embeddings, 0 with rotary positions.
    learned_positions: int = attrs.field(default=0, validator=_whole(0))
    qkv_bias: bool = _flag()
    output_bias: bool = _flag()
    ffn_bias: bool = _flag()
    norm: Norm = attrs.field(default=Norm.RMS, validator=_typed(Norm))
    norms_per_layer: int = attrs.field(default=2, validator=_whole(0))
    #: Queries and keys are normalized per head (two norms of head_dim each per layer).
    qk_norm: bool = _flag()
    #: Where the dimensions come from.
    source: str = attrs.field(default="", validator=_typed(str))
    #: What only running the model needs, e.g. rope_theta: keys of config.json as they stand there, read by backends.
    #: Nothing that is planned depends on them, so specs that differ in them alone are equal.
    runtime_config: Mapping[str, Any] = attrs.field(factory=dict, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        problem = self._contradiction()
        if problem is not None:
            raise ModelConfigError(f"model {self.name!r}: {problem}")

    def _contradiction(self) -> str | None:
        if self.heads % self.kv_heads:
            return f"{self.heads} attention heads are not divisible by {self.kv_heads} KV heads"
        if self.moe is not None and self.moe.dense_layers >= self.layers:
            return f"{self.moe.dense_layers} of {self.layers} layers are dense: no layer is left for experts"
        if self.moe is not None and self.ffn_bias:
            return "ffn_bias is not supported for a mixture of experts"
        if self.latent_attention is not None:
            if self.qkv_bias or self.output_bias or self.qk_norm:
                return "qkv_bias, output_bias and qk_norm are not supported with latent attention"
            if self.head_dim != self.latent_attention.qk_head_dim:
                return (
                    f"head_dim is {self.head_dim}, but latent attention has query/key heads of "
                    f"{self.latent_attention.qk_head_dim} (qk_nope_head_dim + qk_rope_head_dim)"
                )
        return None

    # Attention

    @property
    def attention_width(self) -> int:
        """d_attn such that attention costs 4 d_attn ctx FLOPs per token and layer: heads * head_dim.

        With latent attention, whose value heads are narrower than its query heads, the mean of both widths.
        """
        if self.latent_attention is not None:
            return self.heads * (self.head_dim + self.latent_attention.v_head_dim) // 2
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """d_kv = kv_heads * head_dim, the width of K; what is *cached* is kv_elements_per_token_per_layer."""
        return self.kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Matrices q, k, v, o of one layer: 2 d d_attn + 2 d d_kv; 4 d^2 for multi-head attention."""
        mla = self.latent_attention
        if mla is None:
            return 2 * self.hidden * (self.heads * self.head_dim + self.kv_width)
        queries = self.heads * self.head_dim
        rank = mla.q_lora_rank
        q = self.hidden * queries if rank is None else rank * (self.hidden + queries)
        kv_down = self.hidden * mla.cached_elements
        kv_up = mla.kv_lora_rank * self.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        return q + kv_down + kv_up + self.heads * mla.v_head_dim * self.hidden

    @overload
    def kv_elements_per_token_per_layer(self, tp: int) -> int: ...
    @overload
    def kv_elements_per_token_per_layer(self, tp: NDArray[np.integer]) -> NDArray[np.int64]: ...
    def kv_elements_per_token_per_layer(self, tp: int | NDArray[np.integer]) -> int | NDArray[np.int64]:
        """Elements of K and V that one rank caches per token and layer (model.md, section 4).

        2 * max(1, kv_heads / tp) * head_dim: KV heads are divided over ``tp`` ranks, and replicated beyond
        one per rank. Latent attention caches kv_lora_rank + qk_rope_head_dim on every rank. Windows are not
        applied: this is what one token adds, not how many tokens are kept.

        Args:
            tp: tensor-parallel degree, or an integer array of degrees (the result then has its shape).
        """
        degree: int | NDArray[np.int64]
        if isinstance(tp, int):
            degree = tp
        else:
            import numpy as np

            degree = np.asarray(tp, dtype=np.int64)
        if self.latent_attention is not None:
            return self.latent_attention.cached_elements + 0 * degree
        return 2 * self.head_dim * ((self.kv_heads + degree - 1) // degree)

    # Feed-forward

    def _projections(self, width: int) -> int:
        return (3 if self.gated_ffn else 2) * self.hidden * width

    def _moe_ffn_parameters(self, moe: MoE, experts: int) -> int:
        router = self.hidden * (moe.experts + (1 if moe.shared_gate else 0))
        return router + self._projections(experts * moe.expert_ffn + moe.shared_ffn)

    def _all_ffn_parameters(self, *, active: bool) -> int:
        """Feed-forward matrices of all layers, of all experts or of those that one token meets."""
        if self.moe is None:
            return self.layers * self._projections(self.ffn)
        experts = self.moe.active_experts if active else self.moe.experts
        dense = self.moe.dense_layers
        sparse = (self.layers - dense) * self._moe_ffn_parameters(self.moe, experts)
        return dense * self._projections(self.ffn) + sparse

    @property
    def ffn_parameters(self) -> float:
        """Feed-forward matrices of one layer, all experts and the router; a float, the mean over layers."""
        return self._all_ffn_parameters(active=False) / self.layers

    @property
    def active_ffn_parameters(self) -> float:
        """Feed-forward matrices of one layer that one token meets; a float, the mean over layers."""
        return self._all_ffn_parameters(active=True) / self.layers

    @property
    def active_ffn_width(self) -> int:
        """Feed-forward width that one token fills in the widest layer: d_ff of M_buf and M_actI."""
        if self.moe is None:
            return self.ffn
        routed = self.moe.active_experts * self.moe.expert_ffn + self.moe.shared_ffn
        return max(routed, self.ffn) if self.moe.dense_layers else routed

    @property
    def ffn_gemm_width(self) -> int:
        """Width of the feed-forward GEMMs that do most of the work, d_ff or one expert's: d_ff of eta's w."""
        return self.ffn if self.moe is None else self.moe.expert_ffn

    # Layers

    @property
    def matrix_parameters(self) -> int:
        """Matrices of all layers together, exact."""
        return self.layers * self.attention_parameters + self._all_ffn_parameters(active=False)

    @property
    def layer_parameters(self) -> float:
        """W_layer: matrices of one layer; a float, the mean over layers. 4 d^2 + 2 d d_ff in the paper."""
        return self.matrix_parameters / self.layers

    @property
    def active_layer_parameters(self) -> float:
        """Matrices of one layer that one token meets; forward FLOPs per token: twice this, plus attention."""
        return self.attention_parameters + self.active_ffn_parameters

    # Embedding, head, whole model

    @property
    def embedding_parameters(self) -> int:
        """V d, plus learned positions."""
        return (self.vocab + self.learned_positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """What the head adds in memory: V d for an LM head (0 when tied), d for a scalar head, or both."""
        lm = 0 if self.tied_embeddings or self.head is Head.SCALAR else self.vocab * self.hidden
        return lm + (0 if self.head is Head.LM else self.hidden)

    @property
    def head_flop_parameters(self) -> int:
        """Elements of the head's matrix, applied per token: V d for an LM head even if tied, d for scalar."""
        lm = 0 if self.head is Head.SCALAR else self.vocab * self.hidden
        return lm + (0 if self.head is Head.LM else self.hidden)

    @property
    def small_parameters(self) -> int:
        """Biases and norms of the whole model, the final norm included. Scalar heads have no bias here."""
        layer = self.norms_per_layer * self.hidden * self.norm.parameters_per_element
        if self.qkv_bias:
            layer += self.heads * self.head_dim + 2 * self.kv_width
        if self.output_bias:
            layer += self.hidden
        if self.ffn_bias:
            layer += (2 if self.gated_ffn else 1) * self.ffn + self.hidden
        if self.qk_norm:
            layer += 2 * self.head_dim * self.norm.parameters_per_element
        if self.latent_attention is not None:
            latents = self.latent_attention.kv_lora_rank + (self.latent_attention.q_lora_rank or 0)
            layer += latents * self.norm.parameters_per_element
        total = self.layers * layer + self.hidden * self.norm.parameters_per_element
        if self.moe is not None and self.moe.router_bias:
            total += (self.layers - self.moe.dense_layers) * self.moe.experts
        return total

    @property
    def total_parameters(self) -> int:
        """Every parameter of the model with its head, exact; N_m of the paper."""
        large = self.matrix_parameters + self.embedding_parameters + self.head_parameters
        return large + self.small_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters without the experts that a token does not meet, counted as model cards do."""
        idle = self._all_ffn_parameters(active=False) - self._all_ffn_parameters(active=True)
        return self.total_parameters - idle

    def weights_bytes(self, bytes_per_element: float) -> float:
        """Size of all weights in bytes; an int for an int argument."""
        return self.total_parameters * bytes_per_element

    # Legality and variants

    def tp_problem(self, tp: int) -> str | None:
        """Why this model cannot be split over ``tp`` ranks, or None when it can (model.md, end of section 1).

        Attention heads and feed-forward widths must divide; KV heads are divided or replicated evenly.
        """
        if tp < 1:
            return f"tp={tp} is not a positive degree"
        if self.heads % tp:
            return f"{self.heads} attention heads are not divisible by tp={tp}"
        if self.latent_attention is None and self.kv_heads % tp and tp % self.kv_heads:
            return f"{self.kv_heads} KV heads neither divide tp={tp} nor are divisible by it"
        widths: dict[str, int] = {}
        if self.moe is None or self.moe.dense_layers:
            widths["FFN"] = self.ffn
        if self.moe is not None:
            widths |= {"expert FFN": self.moe.expert_ffn, "shared expert FFN": self.moe.shared_ffn}
        for what, width in widths.items():
            if width % tp:
                return f"{what} width {width} is not divisible by tp={tp}"
        return None

    def with_head(self, head: Head) -> ModelSpec:
        """The same model with another head."""
        return attrs.evolve(self, head=head)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict of all fields; `from_dict` gives back an equal value."""
        values = attrs.asdict(self, value_serializer=_plain)
        if not self.runtime_config:
            del values["runtime_config"]
        return values

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelSpec:
        """The inverse of `to_dict`.

        Raises:
            ModelConfigError: a key is missing or unknown, or a value is not allowed.
        """
        values = dict(data)
        for key, enumeration in (("head", Head), ("norm", Norm)):
            if key in values:
                values[key] = _member(enumeration, key, values[key])
        for key, record in (("moe", MoE), ("latent_attention", LatentAttention)):
            if values.get(key) is not None:
                values[key] = _construct(record, f"model {values.get('name')!r}, {key}", values[key])
        return _construct(cls, f"model {values.get('name')!r}", values)


def _plain(_owner: object, _field: object, value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _member(enumeration: type[enum.Enum], key: str, value: object) -> enum.Enum:
    for member in enumeration:
        if member.value == value:
            return member
    allowed = ", ".join(repr(member.value) for member in enumeration)
    raise ModelConfigError(f"{key} is {value!r}", facts=[f"allowed: {allowed}"])


def _construct(record: type[T], what: str, values: object) -> T:
    """``record(**values)`` with missing and unknown keys named."""
    if not isinstance(values, Mapping):
        raise ModelConfigError(f"{what} is {values!r}", facts=["allowed: a mapping of dimensions"])
    fields: Mapping[str, attrs.Attribute[Any]] = attrs.fields_dict(record)  # type: ignore[arg-type]
    unknown = sorted(str(key) for key in values if key not in fields)
    missing = [key for key, field in fields.items() if field.default is attrs.NOTHING and key not in values]
    if unknown or missing:
        facts = [f"unknown key: {key}" for key in unknown] + [f"missing key: {key}" for key in missing]
        raise ModelConfigError(f"{what} does not have the keys of {record.__name__}", facts=facts)
    return record(**values)
