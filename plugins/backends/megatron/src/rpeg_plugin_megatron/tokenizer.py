"""Tokenizers: a Hugging Face folder, or single characters.

Both are a ``tokenizers`` tokenizer with a pad id and the ids that end a response, so both are exported as files that
``transformers.AutoTokenizer`` loads. No torch in this module.
"""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from rpeg_core.errors import BackendError, DataError, SettingsError

__all__ = ["PRINTABLE", "Tokenizer", "character_tokenizer", "load_tokenizer", "open_tokenizer"]

PRINTABLE = string.digits + string.ascii_letters + string.punctuation + " \n"
"""The alphabet of the character tokenizer when the task brings none."""

_PAD, _END = "<pad>", "<eos>"
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


@attrs.frozen(kw_only=True, eq=False)
class Tokenizer:
    """Text to token ids and back.

    Attributes:
        backend: the ``tokenizers`` tokenizer.
        pad_id: fills rows on the left (prompts) and on the right (responses).
        end_ids: tokens that end a response, at least one.
        end_id: the one of them that is written after a response of a dataset.
        template: Jinja chat template, or None.
        variables: names that the template reads, such as ``bos_token``.
        alphabet: characters of a character tokenizer, else None.
        source: a folder, or ``characters``.
    """

    backend: Backend
    pad_id: int
    end_ids: tuple[int, ...]
    end_id: int
    template: str | None
    variables: Mapping[str, str]
    alphabet: str | None
    source: str

    @property
    def size(self) -> int:
        """One more than the largest id: a model needs at least so many rows of embedding."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text.
            special: let the tokenizer add what it adds by itself, such as a first BOS token.

        Raises:
            DataError: a character tokenizer meets a character outside its alphabet.
        """
        if self.alphabet is not None:
            unknown = sorted(set(text) - set(self.alphabet))
            if unknown:
                raise DataError(
                    f"character {unknown[0]!r} of {text!r} is not in the alphabet",
                    facts=[f"allowed: {''.join(sorted(self.alphabet))!r}"],
                    hint="name a tokenizer's folder, or `characters:` followed by the alphabet",
                )
        return list(self.backend.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids without special tokens; ids that the tokenizer does not have are left out."""
        return str(self.backend.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that asks an assistant to answer ``messages`` (mappings with ``role`` and ``content``).

        Raises:
            SettingsError: there is no template.
            BackendError: jinja2 is not installed.
            DataError: the template refuses the messages.
        """
        if self.template is None:
            raise SettingsError(
                f"tokenizer {self.source!r} has no chat template",
                facts=["looked for: chat_template in tokenizer_config.json, chat_template.jinja"],
                hint="set megatron.chat_template to false and write prompts as plain text",
            )
        return _render(self.template, messages, self.variables, self.source)

    def save(self, folder: Path) -> None:
        """Write the files that ``transformers.AutoTokenizer.from_pretrained(folder)`` loads."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.alphabet is None:
            for name in _FILES:
                if (Path(self.source) / name).is_file():
                    shutil.copyfile(Path(self.source) / name, folder / name)
            return
        self.backend.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": _PAD,
            "eos_token": _END,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def open_tokenizer(reference: str, *, base_dir: Path, alphabet: str = PRINTABLE) -> Tokenizer:
    """The tokenizer that a user named.

    Args:
        reference: a folder (relative to ``base_dir``), ``characters``, or ``characters:`` and the alphabet.
        base_dir: where relative folders start.
        alphabet: of plain ``characters``.

    Raises:
        SettingsError: the folder is not one of a tokenizer, or the alphabet is empty or has a character twice.
        DataError: a file of the folder cannot be read.
    """
    kind, colon, own = reference.partition(":")
    if kind == "characters":
        return character_tokenizer(own if colon else alphabet)
    return load_tokenizer(base_dir / reference)


def character_tokenizer(alphabet: str) -> Tokenizer:
    """One token per character: id 0 pads, id 1 ends, then the characters of ``alphabet`` in their order.

    Raises:
        SettingsError: the alphabet is empty or has a character twice.
    """
    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise SettingsError(f"the alphabet is {alphabet!r}", facts=["allowed: one or more different characters"])
    backend = Backend(models.WordLevel({_PAD: 0, _END: 1} | {c: 2 + i for i, c in enumerate(alphabet)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([_PAD, _END])
    return Tokenizer(
        backend=backend,
        pad_id=0,
        end_ids=(1,),
        end_id=1,
        template=None,
        variables={},
        alphabet=alphabet,
        source="characters",
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: ``tokenizer.json`` and what its configs say of special tokens.

    A response ends at the ``eos_token_id`` of generation_config.json, else at the tokenizer's EOS token, else at
    config.json's ``eos_token_id``. Rows are padded with the tokenizer's pad token, or with its end token if it has
    none.

    Raises:
        SettingsError: the folder has no tokenizer, or no token that ends a response.
        DataError: a file cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        found = "no such folder" if not folder.is_dir() else "it has no tokenizer.json"
        raise SettingsError(
            f"tokenizer {str(folder)!r} cannot be opened: {found}",
            facts=["allowed: a Hugging Face folder with tokenizer.json, or `characters`"],
            hint="save it with transformers' AutoTokenizer.save_pretrained",
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        expected = "expected: a file of the library tokenizers"
        raise DataError(f"{path} cannot be read: {error}", facts=[expected]) from error
    config, generation = _json(folder / "tokenizer_config.json"), _json(folder / "generation_config.json")
    special = {**_json(folder / "special_tokens_map.json"), **config}
    variables = {key: text for key in special if key.endswith("_token") and (text := _content(special[key]))}
    eos = _id(backend, variables.get("eos_token"))
    ends = _ids(generation.get("eos_token_id"))
    ends = ends or ([] if eos is None else [eos]) or _ids(_json(folder / "config.json").get("eos_token_id"))
    if not ends:
        raise SettingsError(
            f"tokenizer {str(folder)!r} has no end token",
            facts=[
                "looked for: eos_token_id in generation_config.json",
                "looked for: eos_token in tokenizer_config.json",
                "looked for: eos_token_id in config.json",
            ],
            hint="add eos_token to tokenizer_config.json",
        )
    end = eos if eos in ends else ends[0]
    pad = _id(backend, variables.get("pad_token"))
    return Tokenizer(
        backend=backend,
        pad_id=end if pad is None else pad,
        end_ids=tuple(ends),
        end_id=end,
        template=_template(folder, config),
        variables=variables,
        alphabet=None,
        source=str(folder),
    )


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", facts=["expected: a JSON object"]) from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds {type(value).__name__}", facts=["expected: a JSON object"])
    return value


def _content(token: object) -> str | None:
    """The text of a special token, written as text or as an object with ``content``."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _id(backend: Backend, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _ids(value: object) -> list[int]:
    found = value if isinstance(value, list) else [value]
    return [item for item in found if isinstance(item, int) and not isinstance(item, bool)]


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((item["template"] for item in template if item.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, str], source: str) -> str:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError as error:
        raise BackendError(
            "a chat template needs jinja2, which is not installed",
            facts=[f"tokenizer: {source}"],
            hint="pip install 'rpeg-plugin-megatron[chat]', or set megatron.chat_template to false",
        ) from error

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    # The environment that chat templates are written for: transformers' `apply_chat_template`, without `strftime_now`:
    # prompts must not depend on the day. Templates that ask whether it is there have a date of their own.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True, tools=None, documents=None, **variables
        )
    except jinja2.UndefinedError as error:
        if "strftime_now" not in str(error):
            raise _unusable(source, messages, error) from error
        raise SettingsError(
            f"the chat template of {source!r} writes today's date into the prompts (strftime_now)",
            facts=["prompts that depend on the day could not be made again, e.g. by --resume"],
            hint="write a date in place of strftime_now(...) in the template, in a copy of the folder",
        ) from error
    except Exception as error:  # of jinja2, or of an expression in the template
        raise _unusable(source, messages, error) from error


def _unusable(source: str, messages: Sequence[Mapping[str, Any]], error: Exception) -> DataError:
    return DataError(
        f"the chat template of {source!r} cannot render {list(messages)!r}: {error}",
        hint="look at the roles and contents of the row",
    )
