"""A plain single-process loop: what every plan of an experiment must compute.

Models are ``transformers``' own with torch's AdamW, everything on one CPU process in one piece: no Megatron, no
process groups, no microbatches, no transfers. It shares with the backend what the two must agree on and nothing else:
the algorithm's semantics, the rows of the dataset, the random numbers of sampling, initial weights by name, and the
spelling of parameters.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from rpeg_plugin_megatron import rows as rows_of
from rpeg_plugin_megatron.dataset import Batch, Data, Limits, open_data
from rpeg_plugin_megatron.huggingface import config_of, pieces
from rpeg_plugin_megatron.installations import first_weights
from rpeg_plugin_megatron.sampling import Sampling, choose, uniforms
from rpeg_plugin_megatron.settings import Settings
from rpeg_plugin_megatron.shards import Fragment
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from rpeg_core.ir import ContainerKind, Operator, Role, Rpeg
from rpeg_core.planning.plan import Plan
from rpeg_core.plugins.registry import Registry
from rpeg_core.runtime.semantics import (
    PROXIMAL_LOGPROBS,
    Content,
    Counts,
    ModelOutputs,
    Recipe,
    Semantics,
    load_semantics,
    minibatch_rows,
    sequences_of,
)
from rpeg_core.settings import build_settings
from rpeg_core.spec.models import Head, ModelSpec
from rpeg_core.spec.workload import Workload

__all__ = ["Job", "Outcome", "PlainModel", "job_of", "parameter_shapes", "run"]

SCORE = "score.weight"


@attrs.frozen(kw_only=True)
class Job:
    """What to run.

    Attributes:
        graph: of one step; its staleness says how old the weights are that generation and inference use.
        semantics, settings: of the algorithm.
        workload: of the experiment.
        data: rows, tokenizer and reward function.
        weights: of a model, by name: a source of whole parameters.
        sampling: how tokens are chosen.
        seed: of the sampling.
    """

    graph: Rpeg
    semantics: Semantics
    settings: Any
    workload: Workload
    data: Data
    weights: Callable[[str], Callable[[Fragment], Tensor]]
    sampling: Sampling
    seed: int


@attrs.frozen(kw_only=True)
class Outcome:
    """What a run left behind.

    Attributes:
        metrics: of every step: training operator -> name -> value.
        rows: data containers of every step by name, when they were asked for.
        models: name -> model with its final weights.
    """

    metrics: tuple[Mapping[str, Mapping[str, float]], ...]
    rows: tuple[Mapping[str, Tensor], ...]
    models: Mapping[str, PlainModel]

    def weights(self, model: str) -> dict[str, Tensor]:
        """Final weights of a model by global name."""
        return self.models[model].export()


def run(
    job: Job,
    steps: int,
    *,
    keep_rows: bool = False,
    after_step: Callable[[int, Mapping[str, Mapping[str, float]]], bool] = lambda step, metrics: True,
) -> Outcome:
    """Run ``steps`` RL steps, fewer when ``after_step`` answers False."""
    models = {model.name: PlainModel(model.spec, job.weights(model.name)) for model in job.graph.models}
    served = {name: _Versions(models[name], tau) for name, tau in job.graph.staleness.items()}
    optimizers = {
        operator.name: _Updates(models[operator.model], job.semantics.recipe(operator.name, job.settings))
        for operator in job.graph.operators
        if operator.role is Role.TRAINING
    }
    all_metrics, all_rows = [], []
    for step in range(steps):
        delayed = {name: versions.at(step) for name, versions in served.items()}
        runner = _Step(job, models | delayed, optimizers, step)
        metrics = {}
        for operator in job.graph.operators:
            found = runner.execute(operator)
            if found:
                metrics[operator.name] = found | _staleness(job.graph, operator, step)
        for versions in served.values():
            versions.trained()
        all_metrics.append(metrics)
        if keep_rows:
            all_rows.append(dict(runner.rows))
        if not after_step(step, metrics):
            break
    return Outcome(metrics=tuple(all_metrics), rows=tuple(all_rows), models=models)


def _staleness(graph: Rpeg, operator: Operator, step: int) -> dict[str, float]:
    """Step k trains version k; what it trains on was made with version max(0, k - tau)."""
    serves = any(other.model == operator.model for other in graph.operators if other is not operator)
    return {"staleness": float(min(step, graph.staleness[operator.model]))} if serves else {}


class _Versions:
    """All versions of a model in training, each a whole copy: what is served is explicitly delayed."""

    def __init__(self, model: PlainModel, tau: int) -> None:
        self._model, self._tau = model, tau
        self._kept = [copy.deepcopy(model)] if tau else []

    def at(self, step: int) -> PlainModel:
        """Version max(0, step - tau); the newest is ``step``."""
        return self._kept[max(0, step - self._tau)] if self._tau else self._model

    def trained(self) -> None:
        """The model has become the next version."""
        if self._tau:
            self._kept.append(copy.deepcopy(self._model))


def job_of(plan: Plan, chosen: Settings) -> Job:
    """What a plan's experiment asks for; ``chosen`` are the backend's settings, of which the layout ones do not matter.

    The plan may be any: only its graph and its experiment count.
    """
    template = Registry().get("algorithm", plan.experiment.algorithm).record
    values = plan.experiment.settings.get(template.name, {})
    semantics, workload = load_semantics(template), plan.workload
    offline = any(semantics.contents.get(name) is Content.SEQUENCES for name in plan.rpeg.inputs)
    return Job(
        graph=plan.rpeg,
        semantics=semantics,
        settings=build_settings(template.settings, values, where=f"settings.{template.name}"),
        workload=workload,
        data=open_data(
            data=chosen.data,
            task=chosen.task,
            tokenizer=chosen.tokenizer,
            chat_template=chosen.chat_template,
            reward=chosen.reward,
            seed=chosen.seed,
            prompts=workload.prompts,
            limits=Limits(prompt_tokens=workload.prompt_tokens, response_tokens=workload.response_tokens),
            pairs=offline,
            base_dir=Path(),
        ),
        weights=lambda model: first_weights(plan.experiment, model, plan.rpeg.model(model).spec, chosen.seed),
        sampling=Sampling(temperature=chosen.temperature, top_k=chosen.top_k, top_p=chosen.top_p),
        seed=chosen.seed,
    )


def parameter_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Megatron's global names of all parameters of a model, with their whole shapes."""
    width, hidden = spec.heads * spec.head_dim, spec.hidden
    stacked = width + 2 * spec.kv_width
    yield "embedding.word_embeddings.weight", (spec.vocab, hidden)
    for layer in range(spec.layers):
        prefix = f"decoder.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}self_attention.linear_qkv.weight", (stacked, hidden)
        if spec.qkv_bias:
            yield f"{prefix}self_attention.linear_qkv.bias", (stacked,)
        if spec.qk_norm:
            yield f"{prefix}self_attention.q_layernorm.weight", (spec.head_dim,)
            yield f"{prefix}self_attention.k_layernorm.weight", (spec.head_dim,)
        yield f"{prefix}self_attention.linear_proj.weight", (hidden, width)
        if spec.output_bias:
            yield f"{prefix}self_attention.linear_proj.bias", (hidden,)
        yield f"{prefix}pre_mlp_layernorm.weight", (hidden,)
        for half in ("gate", "up"):
            yield f"{prefix}mlp.linear_fc1.weight#{half}", (spec.ffn, hidden)
            if spec.ffn_bias:
                yield f"{prefix}mlp.linear_fc1.bias#{half}", (spec.ffn,)
        yield f"{prefix}mlp.linear_fc2.weight", (hidden, spec.ffn)
        if spec.ffn_bias:
            yield f"{prefix}mlp.linear_fc2.bias", (hidden,)
    yield "decoder.final_layernorm.weight", (hidden,)
    if spec.head is not Head.SCALAR and not spec.tied_embeddings:
        yield "output_layer.weight", (spec.vocab, hidden)
    if spec.head is not Head.LM:
        yield SCORE, (1, hidden)


class PlainModel(torch.nn.Module):
    """A ``transformers`` model with a language-model head, a scalar head, or both."""

    def __init__(self, spec: ModelSpec, read: Callable[[Fragment], Tensor]) -> None:
        super().__init__()
        self.spec = spec
        config = config_of(attrs.evolve(spec, head=Head.LM), None)
        kind = config.pop("model_type")
        config.pop("architectures")
        self.body = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **config), attn_implementation="sdpa", dtype=torch.float32
        )
        self.score = None if spec.head is Head.LM else torch.nn.Linear(spec.hidden, 1, bias=False)
        if spec.head is Head.SCALAR:
            self.body.lm_head = None
        self.eval()
        with torch.no_grad():
            for fragment, view in self._pieces():
                view.copy_(read(fragment))

    def _pieces(self) -> Iterator[tuple[Fragment, _Stack]]:
        """Every global parameter with the rows of ``transformers``' parameters that it consists of."""
        named = {name: value.data for name, value in self.body.named_parameters()}
        if self.score is not None:
            named[SCORE] = self.score.weight.data
        for name, shape in parameter_shapes(self.spec):
            fragment = Fragment(name, shape, (0,) * len(shape), shape)
            views = [named[piece.name][piece.start : piece.stop] for piece in pieces(fragment, self.spec)]
            yield fragment, _Stack(views)

    def export(self) -> dict[str, Tensor]:
        """Weights by global name."""
        return {fragment.name: view.joined() for fragment, view in self._pieces()}

    def trainable(self) -> list[torch.nn.Parameter]:
        """All parameters."""
        return list(self.parameters())

    def hidden(self, tokens: Tensor, mask: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        """Last hidden states [n, new, hidden] of the newest tokens, and the cache; ``mask`` covers past ones too."""
        positions = rows_of.position_ids(mask)[:, -tokens.shape[1] :]
        out = self.body.model(
            input_ids=tokens.long(),
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=past,
            use_cache=past is not None,
        )
        return out.last_hidden_state, out.past_key_values

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, t, vocab]."""
        return self.body.lm_head(hidden)

    def values(self, hidden: Tensor) -> Tensor:
        """[n, t]."""
        return self.score(hidden)[..., 0]


@attrs.frozen
class _Stack:
    """Row ranges of several tensors, one under the other."""

    views: list[Tensor]

    def copy_(self, whole: Tensor) -> None:
        """Set them from the rows of one tensor."""
        start = 0
        for view in self.views:
            view.copy_(whole[start : start + view.shape[0]])
            start += view.shape[0]

    def joined(self) -> Tensor:
        """A copy of their rows in one tensor."""
        return torch.cat([view.detach().clone() for view in self.views])


class _Updates:
    """A model's optimizer and the number of its updates."""

    def __init__(self, model: PlainModel, recipe: Recipe) -> None:
        self.model, self.recipe, self.done = model, recipe, 0
        matrices = [p for p in model.trainable() if p.dim() > 1]
        vectors = [p for p in model.trainable() if p.dim() <= 1]
        chosen = recipe.optimizer
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": chosen.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=chosen.learning_rate,
            betas=(chosen.beta1, chosen.beta2),
            eps=chosen.epsilon,
        )

    def step(self, loss: Tensor) -> float:
        """One update; returns the norm of the gradient before clipping."""
        self.optimizer.zero_grad()
        loss.backward()
        largest = self.recipe.optimizer.clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.trainable(), largest)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.optimizer.learning_rate_at(self.done)
        self.optimizer.step()
        self.done += 1
        return float(norm)


class _Step:
    """One RL step."""

    def __init__(self, job: Job, models: Mapping[str, PlainModel], updates: Mapping[str, _Updates], step: int) -> None:
        self.job, self.models, self.updates, self.step = job, models, updates, step
        self.batch: Batch = job.data.dataset.batch(step, 0, job.workload.prompts)
        self.rows: dict[str, Tensor] = {}
        for name, content in job.semantics.contents.items():
            if name in job.graph.inputs:
                self.rows[name] = self.batch.prompts if content is Content.PROMPTS else self.batch.pairs

    def execute(self, operator: Operator) -> dict[str, float]:
        """Run one operator; metrics of a training operator, else nothing."""
        if operator.role is Role.GENERATION:
            self._generate(operator)
            return {}
        if operator.role is Role.INFERENCE:
            self._infer(operator)
            return {}
        return self._train(operator)

    def _outputs(self, operator: Operator) -> Iterator[tuple[str, Content]]:
        for name in sorted(operator.outputs):
            if self.job.graph.container(name).kind is ContainerKind.DATA:
                yield name, self.job.semantics.contents[name]

    def _masks(self, sequences: Tensor) -> tuple[Tensor, Tensor]:
        """Of whole rows and of their responses."""
        tokenizer, length = self.job.data.tokenizer, self.job.workload.prompt_tokens
        whole = rows_of.row_mask(sequences, length, tokenizer.pad_id, tokenizer.end_ids)
        return whole, whole[:, length:]

    @torch.no_grad()
    def _generate(self, operator: Operator) -> None:
        job, model, tokenizer = self.job, self.models[operator.model], self.job.data.tokenizer
        tokens = self.batch.prompts.repeat_interleave(job.workload.rollouts_per_prompt, dim=0)
        length = job.workload.response_tokens
        uniform = torch.from_numpy(uniforms(job.seed, self.step, range(len(tokens)), length))
        mask = rows_of.prompt_mask(tokens, tokenizer.pad_id)
        cache, fresh = DynamicCache(config=model.body.config), tokens
        alive = torch.ones(len(tokens), dtype=torch.bool)
        columns, logprobs = [], []
        for position in range(length):
            hidden, cache = model.hidden(fresh, mask, cache)
            chosen, logprob = choose(model.logits(hidden[:, -1]), uniform[:, position], job.sampling)
            chosen = torch.where(alive, chosen, tokenizer.pad_id).to(torch.int32)
            columns.append(chosen)
            logprobs.append(torch.where(alive, logprob, 0.0))
            fresh, mask = chosen[:, None], torch.cat([mask, alive[:, None]], dim=1)
            alive = alive & ~rows_of.is_any(chosen, tokenizer.end_ids)
        made = {
            Content.SEQUENCES: rows_of.join(tokens, torch.stack(columns, dim=1)),
            Content.LOGPROBS: torch.stack(logprobs, dim=1),
        }
        for name, content in self._outputs(operator):
            self.rows[name] = made[content]

    @torch.no_grad()
    def _infer(self, operator: Operator) -> None:
        job = self.job
        sequences = self.rows[sequences_of(job.graph, operator, job.semantics.contents)]
        responses = sequences[:, job.workload.prompt_tokens :]
        for name, content in self._outputs(operator):
            if operator.model is None:
                self.rows[name] = job.data.rewards(self.batch, responses, job.workload.rollouts_per_prompt)
            elif content is Content.SCORES:
                self.rows[name] = self._scores(self.models[operator.model], sequences)
            else:
                outputs = self._teacher_forced(self.models[operator.model], sequences, entropy=False)
                self.rows[name] = outputs.logprobs if content is Content.LOGPROBS else outputs.values

    def _scores(self, model: PlainModel, sequences: Tensor) -> Tensor:
        whole, response = self._masks(sequences)
        hidden, _ = model.hidden(sequences, whole)
        last = self.job.workload.prompt_tokens + response.sum(1) - 1
        return model.values(hidden).gather(1, last[:, None])[:, 0]

    def _teacher_forced(self, model: PlainModel, sequences: Tensor, *, entropy: bool) -> ModelOutputs:
        """Of response tokens; 0 where they do not count."""
        whole, response = self._masks(sequences)
        start = self.job.workload.prompt_tokens
        hidden, _ = model.hidden(sequences, whole)
        hidden = hidden[:, start - 1 : -1]
        logprobs = values = spread = None
        if model.spec.head is not Head.SCALAR:
            scores = (model.logits(hidden) / self.job.sampling.logprob_temperature).log_softmax(-1)
            tokens = sequences[:, start:].long()
            logprobs = scores.gather(-1, tokens[..., None])[..., 0].masked_fill(~response, 0.0)
            if entropy:
                spread = -(scores.exp() * scores).sum(-1).masked_fill(~response, 0.0)
        if model.spec.head is not Head.LM:
            values = model.values(hidden).masked_fill(~response, 0.0)
        return ModelOutputs(logprobs=logprobs, values=values, entropy=spread)

    def _train(self, operator: Operator) -> dict[str, float]:
        job, updates = self.job, self.updates[operator.name]
        recipe, workload = updates.recipe, job.workload
        trained = sequences_of(job.graph, operator, job.semantics.contents)
        given = {
            name: self.rows[name]
            for name in sorted(operator.inputs)
            if job.graph.container(name).kind is ContainerKind.DATA
        }
        _, mask = self._masks(given[trained])
        prepared = job.semantics.prepare(operator.name, given, mask, lambda x: x, job.settings, workload)
        given |= prepared.rows
        if recipe.proximal:
            with torch.no_grad():
                given[PROXIMAL_LOGPROBS] = self._teacher_forced(updates.model, given[trained], entropy=False).logprobs
        sums: dict[str, float] = {}
        parts = minibatch_rows(workload.prompts, workload.rollouts_per_prompt, recipe.minibatches)
        for _, chosen in itertools.product(range(recipe.epochs), parts):
            index = torch.tensor(chosen)
            rows, kept = {name: value[index] for name, value in given.items()}, mask[index]
            outputs = self._teacher_forced(updates.model, rows[trained], entropy=recipe.entropy)
            counts = Counts(rows=len(chosen), tokens=int(kept.sum()))
            found = job.semantics.loss(operator.name, outputs, rows, kept, counts, job.settings)
            norm = updates.step(found.loss)
            for name, value in ({"loss": found.loss, "grad_norm": norm} | dict(found.metrics)).items():
                sums[name] = sums.get(name, 0.0) + float(torch.as_tensor(value).detach())
        number = recipe.epochs * recipe.minibatches
        metrics = {name: value / number for name, value in sums.items()}
        return metrics | {name: float(value) for name, value in prepared.metrics.items()}
