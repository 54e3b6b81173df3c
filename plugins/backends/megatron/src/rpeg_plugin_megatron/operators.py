"""What an operator does on its ranks, by its role: generation, inference with a model or a function, training.

No algorithm is known here: the containers' contents and the losses come from its semantics. All ranks of an operator
run it together; each gets the rows of its replica and gives those it made, on every rank of the replica alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from rpeg_core.errors import ExecutionError
from rpeg_core.ir import ContainerKind, Operator, Role, Rpeg
from rpeg_core.passes.lower import Node
from rpeg_core.runtime.semantics import (
    PROXIMAL_LOGPROBS,
    Content,
    Counts,
    LossParts,
    ModelOutputs,
    Recipe,
    Semantics,
    minibatch_rows,
    sequences_of,
)
from rpeg_core.spec.workload import Workload
from rpeg_plugin_megatron import forward
from rpeg_plugin_megatron import rows as rows_of
from rpeg_plugin_megatron.dataset import Batch, Data
from rpeg_plugin_megatron.flow import part_rows
from rpeg_plugin_megatron.fused import Links, Minibatch, update_fused
from rpeg_plugin_megatron.generate import Decoding
from rpeg_plugin_megatron.groups import Place, PlaceGroups
from rpeg_plugin_megatron.model import ModelShard
from rpeg_plugin_megatron.regroup import RowShape, home_rows
from rpeg_plugin_megatron.settings import Sampling
from rpeg_plugin_megatron.store import RowsValue
from rpeg_plugin_megatron.train import Trainer, Update

__all__ = ["Job", "Operators", "Result", "row_shape"]


@attrs.frozen(kw_only=True)
class Job:
    """What is the same for all operators of a run.

    Attributes:
        graph: of one step.
        semantics, settings: of the algorithm.
        workload: of the experiment.
        data: rows, tokenizer and reward function.
        sampling: how tokens are chosen.
        seed: of the sampling.
        device: where rows lie.
    """

    graph: Rpeg
    semantics: Semantics
    settings: Any
    workload: Workload
    data: Data
    sampling: Sampling
    seed: int
    device: torch.device


@attrs.frozen
class Result:
    """What an operator made on this rank: rows by container, and metrics by name."""

    rows: Mapping[str, RowsValue]
    metrics: Mapping[str, float]


def row_shape(content: Content, workload: Workload) -> RowShape:
    """The rows of a container in one step."""
    if content is Content.PROMPTS:
        return RowShape(workload.prompts, (workload.prompt_tokens,), torch.int32)
    if content is Content.SEQUENCES:
        return RowShape(workload.sequences, (workload.sequence_tokens,), torch.int32)
    row = () if content is Content.SCORES else (workload.response_tokens,)
    return RowShape(workload.sequences, row, torch.float32)


class Operators:
    """Runs operators on one rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._decodings: dict[tuple[str, int], _Phased] = {}
        self._links: dict[Place, Links] = {}

    def run(
        self,
        node: Node,
        groups: PlaceGroups,
        inputs: Mapping[str, RowsValue],
        shard: ModelShard | None,
        trainers: Mapping[str, Trainer],
    ) -> Result:
        """Run a node; every rank of its allocation calls this.

        Args:
            node: of kind OP.
            groups: of its place.
            inputs: the containers that it reads, but for those of the dataset: this replica's rows.
            shard: of its model with the bound weights, None for a function.
            trainers: by training, in the order of `Operator.trainings`; empty for an operator that serves.
        """
        operator = self._job.graph.operator(node.operator)
        if operator.role is Role.GENERATION:
            return self._generate(node, operator, groups, shard)
        rows = dict(inputs) | self._from_dataset(node, operator, groups)
        if operator.role is Role.TRAINING:
            return self._train(node, operator, groups, rows, trainers)
        return self._infer(node, operator, groups, rows, shard)

    # Generation

    def _generate(self, node: Node, operator: Operator, groups: PlaceGroups, shard: ModelShard) -> Result:
        job, workload = self._job, self._job.workload
        first, last = home_rows(workload.sequences, groups.place, groups.rank)
        key = (node.operator, node.step)
        if not node.phase:
            rollouts = workload.rollouts_per_prompt
            prompts = job.data.dataset.batch(node.step, first // rollouts, last // rollouts).prompts
            decoding = Decoding(
                shard,
                prompts,
                rollouts=rollouts,
                first_row=first,
                seed=job.seed,
                step=node.step,
                sampling=job.sampling,
                response_tokens=workload.response_tokens,
                pad_id=job.data.tokenizer.pad_id,
                end_ids=job.data.tokenizer.end_ids,
                shared_prefix=workload.shared_prefix,
                microbatches=_divisor(last - first, node.microbatches),
            )
            self._decodings[key] = _Phased(decoding, prompts.repeat_interleave(rollouts, dim=0))
        phased = self._decodings[key]
        chosen, last = None, node.phase in (None, len(workload.phases) - 1)
        if node.phase is None:
            phased.decoding.advance(workload.response_tokens)
        else:
            chosen = phased.finish(part_rows(workload, node.phase, groups.place.layout.data), last)
        if last:
            del self._decodings[key]
        made, numbers = phased.decoding.result(), None
        tokens = rows_of.join(phased.prompts.to(made.tokens.device), made.tokens)
        contents = {Content.SEQUENCES: tokens, Content.LOGPROBS: made.logprobs}
        if chosen is not None:
            contents = {content: tensor[chosen.to(tensor.device)] for content, tensor in contents.items()}
            numbers = (chosen + first).to(job.device)
        return Result({name: RowsValue(contents[content], numbers) for name, content in self._outputs(operator)}, {})

    # Inference

    def _infer(
        self,
        node: Node,
        operator: Operator,
        groups: PlaceGroups,
        rows: Mapping[str, RowsValue],
        shard: ModelShard | None,
    ) -> Result:
        job = self._job
        source = rows[sequences_of(job.graph, operator, job.semantics.contents)]
        made: dict[Content, Tensor] = {}
        if shard is None:
            made[Content.SCORES] = self._rewards(node, groups, source)
        elif len(source.tensor) == 0:
            made = {content: self._empty(content) for content in Content}
        else:
            sequences = self._sequences(source.tensor)
            microbatches = _divisor(len(sequences), node.microbatches)
            wanted = {content for _, content in self._outputs(operator)}
            if Content.SCORES in wanted:
                made[Content.SCORES] = forward.score(shard, sequences, microbatches=microbatches)
            if wanted != {Content.SCORES}:
                temperature = job.sampling.logprob_temperature
                found = forward.infer(shard, sequences, microbatches=microbatches, temperature=temperature)
                made |= {Content.LOGPROBS: found.logprobs, Content.VALUES: found.values}
        return Result({name: RowsValue(made[kind], source.numbers) for name, kind in self._outputs(operator)}, {})

    def _rewards(self, node: Node, groups: PlaceGroups, source: RowsValue) -> Tensor:
        """Scores of a function, which runs on the CPU."""
        job, rollouts = self._job, self._job.workload.rollouts_per_prompt
        responses = source.tensor[:, job.workload.prompt_tokens :]
        if source.numbers is None:
            first, last = home_rows(job.workload.sequences, groups.place, groups.rank)
            batch = job.data.dataset.batch(node.step, first // rollouts, last // rollouts)
            return job.data.rewards(batch, responses, rollouts).to(job.device)
        prompts = [number // rollouts for number in source.numbers.tolist()]
        batches = {prompt: job.data.dataset.batch(node.step, prompt, prompt + 1) for prompt in sorted(set(prompts))}
        scores = [
            job.data.rewards(batches[prompt], response[None], 1)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        return torch.cat([*scores, torch.empty(0)]).to(job.device)

    # Training

    def _train(
        self,
        node: Node,
        operator: Operator,
        groups: PlaceGroups,
        given: Mapping[str, RowsValue],
        trainers: Mapping[str, Trainer],
    ) -> Result:
        """The minibatches of a step, one after the other; of a fused operator those of all its trainings together."""
        rows = {name: value.tensor for name, value in given.items()}
        parts = {name: self._training(name, node, operator, groups, rows, trainers[name]) for name in trainers}
        recipes = {(part.recipe.epochs, part.recipe.minibatches) for part in parts.values()}
        if len(recipes) > 1:
            found = ", ".join(f"{name}: {p.recipe.epochs} x {p.recipe.minibatches}" for name, p in parts.items())
            raise ExecutionError(
                f"{node.label} fuses trainings with different numbers of updates",
                facts=[f"epochs x minibatches: {found}"],
                hint="plan with structure.fusion: [false]",
            )
        for chosen in zip(*(part.minibatches() for part in parts.values()), strict=True):
            minibatches = dict(zip(parts, chosen, strict=True))
            if len(parts) == 1:
                for name, minibatch in minibatches.items():
                    parts[name].add(
                        minibatch.trainer.update(
                            minibatch.batches,
                            minibatch.loss,
                            temperature=minibatch.temperature,
                            entropy=minibatch.entropy,
                        )
                    )
            else:
                for name, update in update_fused(minibatches, self._links_of(groups)).items():
                    parts[name].add(update)
        prefixed = [(f"{name}/" if operator.fused else "", part) for name, part in parts.items()]
        return Result({}, {f"{prefix}{key}": v for prefix, part in prefixed for key, v in part.metrics().items()})

    def _links_of(self, groups: PlaceGroups) -> Links:
        """The messages between the stages of a place; made when its first fused operator runs, on all its ranks."""
        if groups.place not in self._links:
            self._links[groups.place] = Links(groups)
        return self._links[groups.place]

    def _training(
        self,
        name: str,
        node: Node,
        operator: Operator,
        groups: PlaceGroups,
        given: Mapping[str, Tensor],
        trainer: Trainer,
    ) -> _Training:
        job, workload, semantics = self._job, self._job.workload, self._job.semantics
        sequences = self._sequences(given[sequences_of(job.graph, operator, semantics.contents)])

        def total(tensor: Tensor) -> Tensor:
            if groups.place.layout.data == 1:
                return tensor
            summed = tensor.clone()
            dist.all_reduce(summed, group=groups.dp)
            return summed

        prepared = semantics.prepare(name, dict(given), sequences.response_mask, total, job.settings, workload)
        recipe, rows = semantics.recipe(name, job.settings), {**given, **prepared.rows}
        if recipe.proximal:
            found = forward.infer(
                trainer.shard,
                sequences,
                microbatches=_divisor(len(sequences), node.microbatches),
                temperature=job.sampling.logprob_temperature,
            )
            rows[PROXIMAL_LOGPROBS] = found.logprobs
        return _Training(
            name=name,
            job=job,
            recipe=recipe,
            trainer=trainer,
            sequences=sequences,
            rows=rows,
            prepared={key: float(value) for key, value in prepared.metrics.items()},
            first_row=home_rows(workload.sequences, groups.place, groups.rank)[0],
            replicas=groups.place.layout.data,
            stages=groups.place.layout.pipeline,
            microbatches=node.microbatches,
            total=total,
        )

    # Rows

    def _from_dataset(self, node: Node, operator: Operator, groups: PlaceGroups) -> dict[str, RowsValue]:
        """The containers that no operator makes, for this replica's prompts."""
        job, graph = self._job, self._job.graph
        wanted = {name for name in operator.inputs & graph.inputs if graph.container(name).kind is ContainerKind.DATA}
        if not wanted:
            return {}
        rollouts = job.workload.rollouts_per_prompt
        first, last = home_rows(job.workload.sequences, groups.place, groups.rank)
        batch = job.data.dataset.batch(node.step, first // rollouts, last // rollouts)
        return {name: RowsValue(self._of_batch(name, batch).to(job.device)) for name in sorted(wanted)}

    def _of_batch(self, container: str, batch: Batch) -> Tensor:
        content = self._job.semantics.contents[container]
        tensor = {Content.PROMPTS: batch.prompts, Content.SEQUENCES: batch.pairs}.get(content)
        if tensor is None:
            raise ExecutionError(
                f"the dataset has no {content.value}, which container {container!r} holds",
                hint="preference data needs prompt, chosen and rejected in every row",
            )
        return tensor

    def _outputs(self, operator: Operator) -> list[tuple[str, Content]]:
        graph, contents = self._job.graph, self._job.semantics.contents
        return [
            (name, contents[name])
            for name in sorted(operator.outputs)
            if graph.container(name).kind is ContainerKind.DATA
        ]

    def _sequences(self, tokens: Tensor) -> forward.Rows:
        length, tokenizer = self._job.workload.prompt_tokens, self._job.data.tokenizer
        mask = rows_of.row_mask(tokens, length, tokenizer.pad_id, tokenizer.end_ids)
        return forward.Rows(tokens.long(), mask, length)

    def _empty(self, content: Content) -> Tensor:
        shape = row_shape(content, self._job.workload)
        return torch.empty(0, *shape.row, dtype=shape.dtype, device=self._job.device)


@attrs.define(kw_only=True, eq=False)
class _Training:
    """One training of a step, on the rows of this replica."""

    name: str
    job: Job
    recipe: Recipe
    trainer: Trainer
    sequences: forward.Rows
    rows: Mapping[str, Tensor]
    prepared: Mapping[str, float]
    first_row: int
    replicas: int
    stages: int
    microbatches: int
    total: Callable[[Tensor], Tensor]
    sums: dict[str, float] = attrs.field(factory=dict)

    def minibatches(self) -> Iterator[Minibatch]:
        """Every minibatch of every epoch, in microbatches."""
        rollouts, recipe = self.job.workload.rollouts_per_prompt, self.recipe
        prompts = len(self.sequences) // rollouts
        parts = minibatch_rows(prompts, rollouts, recipe.minibatches, first_prompt=self.first_row // rollouts)
        mask = self.sequences.response_mask
        for _, chosen in itertools.product(range(recipe.epochs), parts):
            index = torch.tensor(chosen, device=self.job.device)
            pieces = self._pieces(index)
            counts = Counts(rows=len(chosen) * self.replicas, tokens=int(self.total(mask[index].sum())))

            def loss(
                number: int, outputs: ModelOutputs, pieces: Sequence[Tensor] = pieces, counts: Counts = counts
            ) -> LossParts:
                piece = pieces[number]
                rows = {name: tensor[piece] for name, tensor in self.rows.items()}
                return self.job.semantics.loss(self.name, outputs, rows, mask[piece], counts, self.job.settings)

            yield Minibatch(
                trainer=self.trainer,
                batches=[self.sequences[piece] for piece in pieces],
                loss=loss,
                temperature=self.job.sampling.logprob_temperature,
                entropy=recipe.entropy,
            )

    def _pieces(self, index: Tensor) -> tuple[Tensor, ...]:
        """The rows ``index`` in microbatches."""
        together = self.recipe.rows_together
        parts = forward.by_length(
            self.sequences[index],
            _divisor(len(index) // together, self.microbatches),
            pipeline=self.stages,
            together=together,
        )
        return tuple(index[part.to(index.device)] for part in parts)

    def add(self, update: Update) -> None:
        found = {"loss": update.loss, "grad_norm": update.gradient_norm, **update.metrics}
        for name, value in found.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def metrics(self) -> dict[str, float]:
        """Means over the updates, and what was measured before them."""
        updates = self.recipe.epochs * self.recipe.minibatches
        return {name: value / updates for name, value in self.sums.items()} | dict(self.prepared)


@attrs.define(eq=False)
class _Phased:
    """A generation that is under way, with its prompts row by row, and the rows that earlier phases took."""

    decoding: Decoding
    prompts: Tensor
    taken: set[int] = attrs.field(factory=set)

    def finish(self, count: int, last: bool) -> Tensor:
        """Decode until ``count`` more rows are finished; their numbers here. The last phase has all that are left.

        A phase ends when its share of the rows is there, sooner or later than the workload expected; at the longest
        response, rows that never end count as finished.
        """
        left = [row for row in range(len(self.prompts)) if row not in self.taken]
        if last:
            self.decoding.advance(self.decoding.response_tokens)
        else:
            self.decoding.advance(self.decoding.response_tokens, until=lambda: len(self._finished()) >= count)
            finished = self._finished()
            left = finished if len(finished) >= count else [*finished, *(row for row in left if row not in finished)]
        chosen = sorted(left[:count])
        self.taken.update(chosen)
        return torch.tensor(chosen, dtype=torch.int64)

    def _finished(self) -> list[int]:
        return [row for row, done in enumerate(self.decoding.finished) if done and row not in self.taken]


def _divisor(rows: int, most: int) -> int:
    """The largest number of equal parts of ``rows``, at most ``most``."""
    return max(parts for parts in range(1, max(1, most) + 1) if rows % parts == 0)
