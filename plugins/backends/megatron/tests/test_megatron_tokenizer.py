"""Tokenizers: characters, and a folder against transformers' reading of the same folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rpeg_plugin_megatron.tokenizer import PRINTABLE, character_tokenizer, load_tokenizer, open_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rpeg_core.errors import DataError, SettingsError

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {%- if message.role == 'refuse' %}{{ raise_exception('no such role') }}{% endif %}\n"
    "<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}\n"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level BPE tokenizer as transformers saves it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>", "<fill>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["what is three and four, what was that, and what is not"] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<fill>", chat_template=TEMPLATE
    )
    fast.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_characters_are_tokens_and_the_export_reads_the_same_in_transformers(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("0123456789=")
    assert tokenizer.encode("30=") == [5, 2, 12]
    assert tokenizer.decode([5, 2, 12, 1, 0, 0, 99]) == "30="
    assert (tokenizer.pad_id, tokenizer.end_ids, tokenizer.size) == (0, (1,), 13)
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("30=").input_ids == [5, 2, 12]
    assert (theirs.pad_token_id, theirs.eos_token_id) == (0, 1)
    assert theirs.decode([5, 2, 12, 1, 0], skip_special_tokens=True) == "30="


def test_the_printable_alphabet_keeps_any_text_of_it() -> None:
    tokenizer = open_tokenizer("characters", base_dir=Path())
    assert tokenizer.decode(tokenizer.encode(PRINTABLE)) == PRINTABLE
    assert open_tokenizer("characters:ab c", base_dir=Path()).encode("c a") == [5, 4, 2]


def test_a_character_outside_the_alphabet_is_named() -> None:
    with pytest.raises(DataError, match=r"character 'x' of '1x' is not in the alphabet\n  allowed: '01'"):
        character_tokenizer("01").encode("1x")
    with pytest.raises(SettingsError, match="different characters"):
        character_tokenizer("00")


def test_a_folder_encodes_decodes_and_renders_as_transformers_does(folder: Path, tmp_path: Path) -> None:
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = "what is three and four? Ünï\n"
    assert ours.encode(text) == theirs(text).input_ids
    assert ours.decode([*ours.encode(text), 1, 2]) == text
    assert (ours.pad_id, ours.end_ids, ours.size) == (2, (1,), len(theirs))
    messages = [{"role": "system", "content": "be <b>brief</b>"}, {"role": "user", "content": "what?"}]
    rendered = ours.chat(messages)
    assert rendered == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ours.save(tmp_path / "copy")
    assert AutoTokenizer.from_pretrained(tmp_path / "copy")(text).input_ids == theirs(text).input_ids


def test_a_template_that_refuses_and_one_that_is_missing_say_so(folder: Path) -> None:
    with pytest.raises(DataError, match="no such role"):
        load_tokenizer(folder).chat([{"role": "refuse", "content": ""}])
    with pytest.raises(SettingsError, match="has no chat template"):
        character_tokenizer("01").chat([{"role": "user", "content": "0"}])


def test_generation_config_says_which_tokens_end_a_response(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}), encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.end_ids, tokenizer.end_id) == ((2, 1), 1)


def test_without_a_pad_token_the_end_token_pads(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["pad_token"] = None
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert load_tokenizer(folder).pad_id == 1


def test_a_folder_without_a_tokenizer_or_an_end_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no such folder"):
        open_tokenizer("nowhere", base_dir=tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=r"it has no tokenizer\.json"):
        load_tokenizer(tmp_path / "empty")
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SettingsError, match="has no end token"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(folder)


def test_a_template_gets_no_date(folder: Path) -> None:
    """Llama 3's template falls back to a fixed date where there is no clock; one that insists is refused."""
    path = folder / "chat_template.jinja"
    path.write_text("{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}26 Jul 2024{% endif %}")
    assert load_tokenizer(folder).chat([{"role": "user", "content": "what"}]) == "26 Jul 2024"
    path.write_text("Today is {{ strftime_now('%d %b %Y') }}.")
    with pytest.raises(SettingsError) as caught:
        load_tokenizer(folder).chat([{"role": "user", "content": "what"}])
    assert "writes today's date into the prompts (strftime_now)" in str(caught.value)


@pytest.mark.parametrize("template", ["{% for %}", "{{ 5 + messages[0].content }}", "{{ messages[3].content }}"])
def test_a_template_that_cannot_be_rendered_is_named(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(DataError, match=r"the chat template of .* cannot render"):
        load_tokenizer(folder).chat([{"role": "user", "content": "what"}])


def test_ids_of_end_tokens_are_numbers(folder: Path) -> None:
    for value in ("5", ["5"], True):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert load_tokenizer(folder).end_ids == (1,)
