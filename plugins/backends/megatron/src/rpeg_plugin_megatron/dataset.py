"""Where the rows of an RL step come from: lines of a JSONL file, or a built-in task.

A file of prompts has one JSON object per line with ``prompt``, text or chat messages, and whatever the reward function
reads, usually ``answer``; a file of preference pairs has ``prompt``, ``chosen`` and ``rejected``. A prompt or response
that is longer than the workload says is an error, never cut silently.

Which rows a step has follows from (seed, step) alone: a file is read in epochs, each in an order drawn from (seed,
epoch), and a task draws each prompt from (seed, step, index). So a run resumes without a data position to restore, and
every rank makes its own rows.

torch is imported where rows become tensors only: the controller reads the data too, to find mistakes before it starts
workers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attrs
import numpy as np

from rpeg_core.errors import DataError, ExperimentError, SettingsError
from rpeg_plugin_megatron.rewards import Reward, load_reward
from rpeg_plugin_megatron.tasks import Task, task_named
from rpeg_plugin_megatron.tokenizer import PRINTABLE, Tokenizer, open_tokenizer

if TYPE_CHECKING:
    import torch

__all__ = ["Batch", "Data", "Dataset", "FileDataset", "Limits", "TaskDataset", "open_data"]

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Limits:
    """How many tokens a row has room for: Lp and Lr."""

    prompt_tokens: int
    response_tokens: int


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """Some prompts of one step.

    Attributes:
        prompts: int32 [b, Lp], left-padded.
        pairs: int32 [2 b, Lp + Lr], the chosen and then the rejected row of each prompt; None without preferences.
        texts: the prompts as the model reads them, [b].
        rows: the row of the dataset behind each prompt, [b].
    """

    prompts: torch.Tensor
    pairs: torch.Tensor | None
    texts: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]


class Dataset(Protocol):
    """Rows by step.

    Attributes:
        largest_id: of the tokens of all rows, padding left out.
        equal_pairs: where the chosen response is the rejected one, so that there is nothing to prefer.
    """

    @property
    def largest_id(self) -> int: ...

    @property
    def equal_pairs(self) -> tuple[str, ...]: ...

    def batch(self, step: int, start: int, stop: int) -> Batch:
        """Prompts ``start`` to ``stop`` (excluded) of RL step ``step``."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class Data:
    """What a run reads: its rows, the tokenizer that made them, and the function that scores responses.

    Attributes:
        reward: None when neither the user nor the task names one (preference data, or a reward model scores).
    """

    dataset: Dataset
    tokenizer: Tokenizer
    reward: Reward | None

    def require_reward(self) -> Reward:
        """The function that scores responses.

        Raises:
            SettingsError: none is named.
        """
        if self.reward is None:
            raise SettingsError(
                "no reward function is named",
                facts=[
                    "needed by: an algorithm whose reward is a function",
                    "default: exact_match, where all rows of megatron.data have an 'answer'",
                ],
                hint="set megatron.reward to package.module:name",
            )
        return self.reward

    def check_vocabulary(self, model: str, vocab: int) -> None:
        """Make sure that a model has an embedding for every token of the rows.

        Raises:
            ExperimentError: it lacks one.
        """
        largest = max(self.dataset.largest_id, self.tokenizer.pad_id, self.tokenizer.end_id)
        if largest >= vocab:
            raise ExperimentError(
                f"model {model!r} has a vocabulary of {vocab}, the rows have token {largest}",
                facts=[f"tokenizer: {self.tokenizer.source}, {self.tokenizer.size} tokens"],
                hint=f"raise vocab to at least {self.tokenizer.size}, or name the tokenizer of the model",
            )

    def rewards(self, batch: Batch, responses: torch.Tensor, rollouts: int) -> torch.Tensor:
        """Scores of responses to the prompts of a batch.

        Args:
            batch: b prompts.
            responses: [b * rollouts, Lr], prompt-major.
            rollouts: responses per prompt.

        Returns:
            fp32 [b * rollouts] on the CPU.

        Raises:
            SettingsError: no reward function is named.
            ExecutionError: the function raised or returned no finite number.
        """
        import torch

        from rpeg_plugin_megatron import rows as rows_of

        reward = self.require_reward()
        scores = []
        for index, response in enumerate(responses.cpu()):
            prompt = index // rollouts
            text = self.tokenizer.decode(rows_of.strip_response(response, self.tokenizer.end_ids))
            scores.append(reward(batch.texts[prompt], text, batch.rows[prompt]))
        return torch.tensor(scores, dtype=torch.float32)


def open_data(
    *,
    data: str | None,
    task: str | None,
    tokenizer: str,
    chat_template: bool,
    reward: str | None,
    seed: int,
    prompts: int,
    limits: Limits,
    pairs: bool,
    base_dir: Path,
) -> Data:
    """The data that the settings of a run name.

    Args:
        data: a JSONL file, or None with ``task``.
        task: a built-in task, or None with ``data``.
        tokenizer: a folder or ``characters``, see `open_tokenizer`.
        chat_template: wrap prompts in the tokenizer's chat template.
        reward: dotted path; None takes the task's own, and ``exact_match`` for a file of prompts whose rows all have
            an ``answer``.
        seed: of the order of rows and the prompts of tasks.
        prompts: B, prompts per step of the whole batch.
        limits: room of a row.
        pairs: preference pairs instead of prompts.
        base_dir: where relative paths start.

    Raises:
        SettingsError: neither or both of data and task are given, a name is not known, or the tokenizer cannot be used.
        DataError: a line of the file cannot be used, or lacks what a reward function of this package reads.
        ExperimentError: the task does not fit the workload.
    """
    if (data is None) == (task is None):
        given = "neither is given" if data is None else f"both are given: {data!r} and {task!r}"
        raise SettingsError(f"megatron.data and megatron.task: {given}", hint="set one of them")
    if task is not None:
        chosen = task_named(task)
        opened = open_tokenizer(tokenizer, base_dir=base_dir, alphabet=chosen.alphabet)
        function = load_reward(reward or chosen.reward)
        return Data(dataset=TaskDataset.of(chosen, opened, limits, seed, pairs), tokenizer=opened, reward=function)
    opened = open_tokenizer(tokenizer, base_dir=base_dir, alphabet=PRINTABLE)
    dataset = FileDataset.read(
        base_dir / str(data), opened, limits, chat=chat_template, pairs=pairs, seed=seed, prompts=prompts
    )
    answered = not pairs and all("answer" in line.row for line in dataset.lines)
    path = reward or ("rpeg_plugin_megatron.rewards:exact_match" if answered else None)
    function = None if path is None else load_reward(path)
    if function is not None and not pairs:
        for line in dataset.lines:
            problem = function.problem(line.row)
            if problem is not None:
                raise DataError(f"{line.where} {problem}", facts=[f"needed by: reward {function.path}"])
    return Data(dataset=dataset, tokenizer=opened, reward=function)


@attrs.frozen(eq=False)
class _Line:
    """One prepared line of a file, or row of a task; ``where`` it is, for errors."""

    where: str
    text: str
    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    row: Mapping[str, Any]


@attrs.frozen(kw_only=True, eq=False)
class FileDataset:
    """The lines of a JSONL file, in an order that is drawn anew for every epoch."""

    lines: tuple[_Line, ...]
    pad_id: int
    limits: Limits
    seed: int
    prompts: int

    @classmethod
    def read(
        cls,
        path: Path,
        tokenizer: Tokenizer,
        limits: Limits,
        *,
        chat: bool,
        pairs: bool,
        seed: int,
        prompts: int,
    ) -> FileDataset:
        """Read, check and tokenize all lines of a file; empty lines are left out.

        Raises:
            DataError: the file or one of its lines cannot be used; file, line and what is allowed are named.
        """
        try:
            content = path.read_bytes().decode("utf-8-sig")  # spreadsheets and Windows begin files with a mark
        except OSError as error:
            problem = error.strerror or str(error)
            raise DataError(f"cannot read {path}: {problem}", hint="megatron.data names a JSONL file") from error
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise DataError(
                f"{path}, line {line} is not UTF-8: {error.reason}", facts=["allowed: a JSONL file in UTF-8"]
            ) from error
        lines = []
        for number, text in enumerate(content.split("\n"), start=1):
            if text.strip():
                reader = _LineReader(f"{path}, line {number}", tokenizer, limits, chat)
                lines.append(reader.read(text, pairs))
        if not lines:
            raise DataError(f"{path} has no rows", facts=["expected: one JSON object per line"])
        return cls(lines=tuple(lines), pad_id=tokenizer.pad_id, limits=limits, seed=seed, prompts=prompts)

    @property
    def largest_id(self) -> int:
        return max(max(ids) for line in self.lines for ids in (line.prompt, *line.responses))

    @property
    def equal_pairs(self) -> tuple[str, ...]:
        return tuple(line.where for line in self.lines if line.responses and len(set(line.responses)) == 1)

    def indices(self, step: int, start: int, stop: int) -> list[int]:
        """Lines behind prompts ``start`` to ``stop`` of a step, counted from 0."""
        orders: dict[int, np.ndarray] = {}
        chosen = []
        for position in range(step * self.prompts + start, step * self.prompts + stop):
            epoch, offset = divmod(position, len(self.lines))
            if epoch not in orders:
                orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(len(self.lines))
            chosen.append(int(orders[epoch][offset]))
        return chosen

    def batch(self, step: int, start: int, stop: int) -> Batch:
        """Prompts ``start`` to ``stop`` (excluded) of RL step ``step``."""
        chosen = [self.lines[index] for index in self.indices(step, start, stop)]
        return _batch(chosen, self.pad_id, self.limits)


@attrs.frozen(kw_only=True, eq=False)
class TaskDataset:
    """Prompts of a built-in task, drawn for every step."""

    task: Task
    tokenizer: Tokenizer
    limits: Limits
    seed: int
    symbols: int
    pairs: bool

    @classmethod
    def of(cls, task: Task, tokenizer: Tokenizer, limits: Limits, seed: int, pairs: bool) -> TaskDataset:
        """The dataset of a task.

        Raises:
            ExperimentError: the task does not fit ``limits``.
            SettingsError: the tokenizer does not write one token per character.
        """
        missing = set() if tokenizer.alphabet is None else set(task.alphabet) - set(tokenizer.alphabet)
        if missing or any(len(tokenizer.encode(character)) != 1 for character in task.alphabet):
            raise SettingsError(
                f"tokenizer {tokenizer.source!r} does not write each of {task.alphabet!r} as one token",
                facts=[f"needed by: task {task.name!r}"],
                hint="set megatron.tokenizer to characters",
            )
        symbols = task.symbols(limits.prompt_tokens, limits.response_tokens)
        return cls(task=task, tokenizer=tokenizer, limits=limits, seed=seed, symbols=symbols, pairs=pairs)

    @property
    def equal_pairs(self) -> tuple[str, ...]:
        return ()

    @property
    def largest_id(self) -> int:
        return max(self.tokenizer.encode(self.task.alphabet, special=False))

    def batch(self, step: int, start: int, stop: int) -> Batch:
        """Prompts ``start`` to ``stop`` (excluded) of RL step ``step``."""
        return _batch([self._line(step, index) for index in range(start, stop)], self.tokenizer.pad_id, self.limits)

    def _line(self, step: int, index: int) -> _Line:
        example = self.task.example(self.seed, step, index, self.symbols)
        encode, end = self.tokenizer.encode, self.tokenizer.end_id
        answers = (example.answer, example.rejected) if self.pairs else ()
        return _Line(
            f"prompt {index} of step {step} of task {self.task.name}",
            example.prompt,
            tuple(encode(example.prompt)),
            tuple((*encode(answer), end) for answer in answers),
            {"prompt": example.prompt, "answer": example.answer},
        )


def _batch(lines: Sequence[_Line], pad_id: int, limits: Limits) -> Batch:
    from rpeg_plugin_megatron import rows as rows_of

    prompts = rows_of.left_pad([line.prompt for line in lines], limits.prompt_tokens, pad_id)
    pairs = None
    if lines and lines[0].responses:
        responses = rows_of.right_pad(
            [response for line in lines for response in line.responses], limits.response_tokens, pad_id
        )
        pairs = rows_of.join(prompts.repeat_interleave(2, dim=0), responses)
    return Batch(
        prompts=prompts, pairs=pairs, texts=tuple(line.text for line in lines), rows=tuple(line.row for line in lines)
    )


@attrs.frozen
class _LineReader:
    """Checks one line of a JSONL file."""

    where: str
    tokenizer: Tokenizer
    limits: Limits
    chat: bool

    def read(self, text: str, pairs: bool) -> _Line:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._error(f"is not JSON: {error}", "a JSON object on one line") from error
        if not isinstance(row, dict):
            raise self._error(f"is {_kind(row)}", "a JSON object")
        prompt = self._prompt(row)
        ids = self._encode("prompt", prompt, special=not self.chat)
        if not ids:
            raise self._error("has an empty prompt", "at least one token")
        if ids[0] == self.tokenizer.pad_id:
            raise self._error(
                f"has a prompt that begins with the pad token (id {ids[0]})",
                "another first token: leading pad tokens are padding",
            )
        self._fits("prompt", ids, "prompt_tokens", self.limits.prompt_tokens)
        responses = [self._response(row, key) for key in ("chosen", "rejected")] if pairs else []
        return _Line(self.where, prompt, tuple(ids), tuple(responses), row)

    def _prompt(self, row: Mapping[str, Any]) -> str:
        if "prompt" not in row:
            raise self._error(f"has no key 'prompt', only {', '.join(map(repr, row)) or 'none'}", "a key 'prompt'")
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return self._chat([{"role": "user", "content": prompt}]) if self.chat else prompt
        if not (isinstance(prompt, list) and prompt and all(_is_message(item) for item in prompt)):
            allowed = "text, or a list of chat messages {role: ..., content: ...}"
            raise self._error(f"has a prompt that is {_kind(prompt)}", allowed)
        if not self.chat:
            raise self._error(
                "has chat messages as prompt, but megatron.chat_template is false",
                "text, or chat messages with megatron.chat_template: true",
            )
        return self._chat(prompt)

    def _chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self._located(lambda: self.tokenizer.chat(messages))

    def _response(self, row: Mapping[str, Any], key: str) -> tuple[int, ...]:
        response = row.get(key)
        if not isinstance(response, str):
            what = f"has no key {key!r}" if key not in row else f"has a {key!r} that is {_kind(response)}"
            raise self._error(what, "text under each of 'prompt', 'chosen' and 'rejected'")
        ids = (*self._encode(key, response, special=False), self.tokenizer.end_id)
        self._fits(f"{key!r}, end token included,", ids, "response_tokens", self.limits.response_tokens)
        return ids

    def _encode(self, key: str, text: str, *, special: bool) -> list[int]:
        return self._located(lambda: self.tokenizer.encode(text, special=special))

    def _located(self, call: Callable[[], T]) -> T:
        """The result of ``call``, its error with this line's place."""
        try:
            return call()
        except DataError as error:
            raise DataError(error.what, facts=[f"in: {self.where}", *error.facts], hint=error.hint) from error

    def _fits(self, what: str, ids: Sequence[int], key: str, most: int) -> None:
        if len(ids) > most:
            raise DataError(
                f"{self.where}: {what} has {len(ids)} tokens",
                facts=[f"allowed: at most {most} (workload.{key})"],
                hint=f"raise workload.{key}, or leave the row out",
            )

    def _error(self, what: str, allowed: str) -> DataError:
        return DataError(f"{self.where} {what}", facts=[f"allowed: {allowed}"])


def _is_message(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and "content" in item


def _kind(value: object) -> str:
    """A JSON value's type in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"the number {value!r}")
