"""Weights between Hugging Face folders and Megatron's parameters, for llama-, mistral-, qwen2- and qwen3-class models.

The two spell the same matrices differently. Megatron stacks q, k and v of every KV group into one matrix,

    linear_qkv = [q of group 0; k of group 0; v of group 0; q of group 1; …],

and gate and up projection into ``linear_fc1``, which `Fragment` keeps apart. A fragment is therefore a few row ranges
of Hugging Face tensors, put one under the other; `pieces` lists them, and reading and writing both follow that list.
Nothing is computed, so a round trip is exact to the last bit.

Scalar heads are ``score.weight`` in both, as in ``transformers``' sequence classifiers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rpeg_core.errors import BackendError, ModelConfigError
from rpeg_core.spec.models import Head, ModelSpec, Norm
from rpeg_plugin_megatron.numerics import Numerics
from rpeg_plugin_megatron.shards import Fragment
from rpeg_plugin_megatron.tokenizer import Tokenizer

__all__ = ["Piece", "config_of", "export", "pieces", "reader"]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_GLOBAL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc1.weight#gate": "mlp.gate_proj.weight",
    "mlp.linear_fc1.weight#up": "mlp.up_proj.weight",
    "mlp.linear_fc1.bias#gate": "mlp.gate_proj.bias",
    "mlp.linear_fc1.bias#up": "mlp.up_proj.bias",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
}
_QKV = "self_attention.linear_qkv."
_SCORE = "score.weight"

_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}
_ONE_LABEL: Mapping[str, Any] = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
"""How ``transformers`` is told that a sequence classifier has one output."""

_FILE_BYTES = 4_000_000_000


@attrs.frozen
class Piece:
    """Rows ``start`` to ``stop`` of the Hugging Face tensor ``name``, whose shape is ``shape``."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


def pieces(fragment: Fragment, spec: ModelSpec) -> tuple[Piece, ...]:
    """The Hugging Face rows that make up a fragment, from its first row to its last; columns are the fragment's own.

    Args:
        fragment: a box of a Megatron parameter.
        spec: the model.

    Raises:
        BackendError: the parameter has no counterpart.
    """
    name = fragment.name
    start, stop = fragment.start[0], fragment.stop[0]
    if name == "output_layer.weight" and spec.tied_embeddings:
        name = "embedding.word_embeddings.weight"
    if name == _SCORE:
        return (Piece(_SCORE, fragment.shape, start, stop),)
    if name in _GLOBAL:
        return (Piece(_GLOBAL[name], fragment.shape, start, stop),)
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        prefix, rest = f"model.layers.{layer[1]}.", layer[2]
        if rest in _IN_LAYER:
            return (Piece(prefix + _IN_LAYER[rest], fragment.shape, start, stop),)
        if rest.startswith(_QKV):
            kind = rest.removeprefix(_QKV)
            return tuple(_qkv(f"{prefix}self_attn.", kind, fragment.shape[1:], start, stop, spec))
    raise BackendError(
        f"parameter {fragment.name!r} has no counterpart in a Hugging Face {spec.family} model",
        facts=[f"model: {spec.name}", f"allowed: parameters of {', '.join(sorted(_CLASSES))} models"],
    )


def _qkv(prefix: str, kind: str, columns: tuple[int, ...], start: int, stop: int, spec: ModelSpec) -> Iterator[Piece]:
    """Rows ``start`` to ``stop`` of linear_qkv, group by group."""
    queries = spec.heads // spec.kv_heads * spec.head_dim
    group_rows = queries + 2 * spec.head_dim
    parts = (
        ("q_proj", 0, queries, spec.heads * spec.head_dim),
        ("k_proj", queries, spec.head_dim, spec.kv_width),
        ("v_proj", queries + spec.head_dim, spec.head_dim, spec.kv_width),
    )
    for group in range(start // group_rows, -(-stop // group_rows)):
        for projection, offset, rows, total in parts:
            first = group * group_rows + offset
            low, high = max(start, first), min(stop, first + rows)
            if low < high:
                origin = group * rows - first
                yield Piece(f"{prefix}{projection}.{kind}", (total, *columns), origin + low, origin + high)


# Reading


def reader(
    folder: Path,
    spec: ModelSpec,
    *,
    missing: Callable[[Fragment], torch.Tensor] | None = None,
) -> Callable[[Fragment], torch.Tensor]:
    """A function that reads fragments out of the safetensors files of a Hugging Face folder.

    Only the rows that are asked for are read. Tensors have the type they are stored in and lie on the CPU.

    Args:
        folder: with model.safetensors, or several files and model.safetensors.index.json.
        spec: the model.
        missing: makes a scalar head that the folder does not have; None refuses such a folder.

    Raises:
        BackendError: the folder has no weights. The function raises it when a tensor is missing or has another shape.
    """
    files = _index(folder)
    opened: dict[Path, Any] = {}

    def stored(name: str) -> Any:
        """The tensor in its file; a file is opened once, which reads its header."""
        if files[name] not in opened:
            opened[files[name]] = _open(files[name])
        return opened[files[name]].get_slice(name)

    def read(fragment: Fragment) -> torch.Tensor:
        if fragment.name == _SCORE and _SCORE not in files and missing is not None:
            return missing(fragment)
        parts = []
        for piece in pieces(fragment, spec):
            name = _stored_name(piece, files, folder, fragment)
            parts.append(_read_piece(stored(name), name, folder, piece, fragment))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return read


def _index(folder: Path) -> Mapping[str, Path]:
    """The file that holds each tensor."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: folder / file for name, file in weights.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise BackendError(
                f"{index} cannot be read: {problem}", facts=["expected: a JSON object with weight_map"]
            ) from error
    single = folder / "model.safetensors"
    if not single.is_file():
        raise BackendError(
            f"{folder} has no weights",
            facts=["allowed: a folder with model.safetensors, or with model.safetensors.index.json and its files"],
            hint="save the model with transformers' save_pretrained",
        )
    with _open(single) as opened:
        return dict.fromkeys(opened.keys(), single)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise BackendError(
            f"{path} cannot be read: {error}",
            facts=["expected: a safetensors file"],
            hint="is it complete, and not the pointer that git without LFS leaves in its place?",
        ) from error


def _stored_name(piece: Piece, files: Mapping[str, Path], folder: Path, fragment: Fragment) -> str:
    # Folders of a model without head lack the prefix.
    for name in (piece.name, piece.name.removeprefix("model.")):
        if name in files:
            return name
    raise BackendError(
        f"{folder} has no tensor {piece.name!r}",
        facts=[f"needed by: {fragment.name}"],
        hint="does the folder hold the model that the experiment names?",
    )


def _read_piece(stored: Any, name: str, folder: Path, piece: Piece, fragment: Fragment) -> torch.Tensor:
    shape = tuple(stored.get_shape())
    if shape != piece.shape:
        raise BackendError(
            f"tensor {name!r} of {folder} has shape {list(shape)}",
            facts=[f"allowed: {list(piece.shape)}, which {fragment.name} needs"],
            hint="does the folder hold the model that the experiment names?",
        )
    if len(shape) == 1:
        return stored[piece.start : piece.stop]
    return stored[piece.start : piece.stop, fragment.start[1] : fragment.stop[1]]


# Writing


def export(
    fragments: Iterable[tuple[Fragment, torch.Tensor]],
    spec: ModelSpec,
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    source: Path | None = None,
    file_bytes: int = _FILE_BYTES,
) -> None:
    """Write a folder that ``transformers`` loads, from the fragments of a model in any order.

    Tensors are written as soon as they are complete, so that fragments may be gathered one after the other. Fragments
    that were already given are ignored.

    Args:
        fragments: boxes and their values; together they must cover the model.
        spec: the model.
        folder: is made; files of the same names are replaced.
        tokenizer: whose files are added.
        source: the folder that the weights came from; its config.json and generation_config.json are taken over.
        file_bytes: a file is closed when it has so many bytes.

    Raises:
        BackendError: parts of a tensor are missing at the end, or a parameter has no counterpart.
        ModelConfigError: the model is of a class that is not supported.
    """
    config = config_of(spec, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    writer = _Writer(folder, file_bytes)
    seen: set[Fragment] = set()
    dtype = None
    for fragment, values in fragments:
        if fragment in seen:
            continue
        seen.add(fragment)
        dtype = values.dtype
        first = 0
        for piece in pieces(fragment, spec):
            rows = piece.stop - piece.start
            writer.add(piece, values[first : first + rows].detach(), fragment)
            first += rows
    writer.close()
    if source is not None and (source / "config.json").is_file():
        head = {key: config[key] for key in ("architectures", *_ONE_LABEL) if key in config}
        config = json.loads((source / "config.json").read_text(encoding="utf-8")) | head
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    config.pop("dtype", None)
    _write_json(folder / "config.json", config)
    if source is not None and (source / "generation_config.json").is_file():
        (folder / "generation_config.json").write_bytes((source / "generation_config.json").read_bytes())
    if tokenizer is not None:
        tokenizer.save(folder)


def config_of(spec: ModelSpec, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The ``config.json`` of a model, except its element type.

    Raises:
        ModelConfigError: the model is none of the classes that are supported.
    """
    family = _family(spec)
    positions = spec.runtime_config.get("max_position_embeddings", 32768)
    head = "ForSequenceClassification" if spec.head is Head.SCALAR else "ForCausalLM"
    config: dict[str, Any] = {
        "architectures": [_CLASSES[family] + head],
        "model_type": family,
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": positions,
        "tie_word_embeddings": spec.tied_embeddings,
        "use_cache": True,
    }
    if spec.head is Head.SCALAR:
        config |= _ONE_LABEL
    if family in ("llama", "qwen3"):
        config["attention_bias"] = spec.output_bias
    if family == "llama":
        config["mlp_bias"] = spec.ffn_bias
    if family == "mistral":
        config["sliding_window"] = None
    if tokenizer is not None:
        ends = tokenizer.end_ids
        config |= {"pad_token_id": tokenizer.pad_id, "eos_token_id": ends[0] if len(ends) == 1 else list(ends)}
    return config | Numerics.from_config(spec.runtime_config, spec.name).to_config()


def _family(spec: ModelSpec) -> str:
    """The class of ``transformers`` that has exactly the matrices of a model."""
    plain = spec.moe is None and spec.latent_attention is None and spec.norm is Norm.RMS and spec.gated_ffn
    plain = plain and not spec.learned_positions and spec.norms_per_layer == 2
    family = None
    if plain and spec.qk_norm:
        family = "qwen3" if spec.qkv_bias == spec.output_bias and not spec.ffn_bias else None
    elif plain and spec.qkv_bias and not spec.output_bias:
        family = "qwen2" if not spec.ffn_bias else None
    elif plain and spec.qkv_bias == spec.output_bias:
        bias = spec.qkv_bias or spec.ffn_bias
        family = "mistral" if spec.family == "mistral" and not bias else "llama"
    if family is None:
        raise ModelConfigError(
            f"model {spec.name!r} has no counterpart in transformers that can be written",
            facts=[f"allowed: models of the classes {', '.join(sorted(_CLASSES))}"],
        )
    return family


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class _Writer:
    """Assembles tensors and writes the complete ones, file by file."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        #: Tensors in assembly: the values, how many are there, who needs them.
        self._open: dict[str, tuple[torch.Tensor, int]] = {}
        self._complete: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._files: list[list[str]] = []
        self._total_bytes = 0

    def add(self, piece: Piece, values: torch.Tensor, fragment: Fragment) -> None:
        """Put the rows of one piece into their tensor."""
        tensor, filled = self._open.pop(piece.name, (None, 0))
        if tensor is None:
            tensor = torch.empty(piece.shape, dtype=values.dtype)
        box = (slice(piece.start, piece.stop), *fragment.slices[1:])
        tensor[box] = values.to("cpu")
        filled += values.numel()
        if filled < tensor.numel():
            self._open[piece.name] = tensor, filled
            return
        self._complete[piece.name] = tensor
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes >= self._file_bytes:
            self._flush()

    def close(self) -> None:
        """Write what is left, and the index when there are several files."""
        if self._open:
            name, (tensor, filled) = min(self._open.items())
            raise BackendError(
                f"{len(self._open)} tensors are incomplete, first {name!r}: {filled} of {tensor.numel()} elements"
            )
        self._flush()
        for stale in self._folder.glob("model*.safetensors*"):
            stale.unlink()
        count = len(self._files)
        names = ["model.safetensors"] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in _to(count)]
        for index, name in enumerate(names):
            self._part(index).rename(self._folder / name)
        if count > 1:
            weights = {tensor: name for name, tensors in zip(names, self._files, strict=True) for tensor in tensors}
            index_file = self._folder / "model.safetensors.index.json"
            _write_json(index_file, {"metadata": {"total_size": self._total_bytes}, "weight_map": weights})

    def _flush(self) -> None:
        if self._complete:
            save_file(self._complete, self._part(len(self._files)), metadata={"format": "pt"})
            self._files.append(sorted(self._complete))
            self._total_bytes += self._bytes
            self._complete, self._bytes = {}, 0

    def _part(self, index: int) -> Path:
        return self._folder / f".part-{index}.safetensors"


def _to(count: int) -> range:
    return range(1, count + 1)
