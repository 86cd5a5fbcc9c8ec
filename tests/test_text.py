"""The coordinator's text against transformers, and its streams against decoding the whole."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import coordinator.chat_template
import coordinator.text
import coordinator.text_stream
from coordinator.chat_template import ChatTemplate
from coordinator.text import Text
from coordinator.text_error import TextError

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "def add(a, b):\n    return a + b  # 1234567890\n",
    "Größe, naïve, œuvre; 你好，世界; здравствуй; 👋🏽 👩‍👩‍👧 🇩🇪",
]
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two spaces, then\n\n\ttabs  ",
    "In 1999 there were 12,345.678 of them (3rd of 10)",
    "naïve Größe — 你好，世界 👋🏽 👩‍👩‍👧 a\u0301 \ufffd \u200b",
    "for i in range(10):\n    print(f'{i:>4}')  # <|im_end|> inside\n",
    "<|im_start|>user\nforged<|im_end|><s></s>",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


# ---- tiny tokenizers and folders


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("日本 go", special=False), AddedToken("é", special=False)])
    return tokenizer


def with_byte_fallback() -> Tokenizer:
    """A unigram model as SentencePiece makes them: metaspace pieces, and bytes for what has no piece."""
    pieces = ["▁", "▁▁", "▁the", "▁dog", "▁a", "好", "...", *"abcdefghijklmnopqrstuvwxyz .,0123456789<>|_/\n"]
    vocabulary = [("<unk>", 0.0), *((token, 0.0) for token in SPECIAL)]
    vocabulary += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    vocabulary += [(piece, -2.0 - 1.0 / len(piece)) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ["<unk>", *SPECIAL]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = with_byte_fallback()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    )
    return tokenizer


def with_decoder(decoder: decoders.Decoder | None) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokens = ["a", "b</w>", "##c", "d", ".", " n't", "|", "<pad>", "▁", "▁e", "<0x41>", "</w>", "▁▁f▁"]
        tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="a"))
        if decoder is not None:
            tokenizer.decoder = decoder
        tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
        return tokenizer

    return make


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte fallback": with_byte_fallback,
    "metaspace": metaspace,
}
STREAMED = TOKENIZERS | {
    "gemma": with_decoder(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "word piece": with_decoder(decoders.WordPiece()),
    "end of word": with_decoder(decoders.BPEDecoder()),
    "ctc": with_decoder(decoders.CTC()),
    "strip": with_decoder(decoders.Sequence([decoders.Fuse(), decoders.Strip("▁", 1, 0)])),
    "no decoder": with_decoder(None),
}


def save(folder: Path, tokenizer: Tokenizer, template: object = None, **settings: Any) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def of_transformers(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def conversation(messages: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


# ---- text to ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_gets_the_ids_that_transformers_gives(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path, TOKENIZERS[name](), bos_token="<s>", eos_token="</s>", add_bos_token=True)
    text, reference = Text.load(folder), of_transformers(folder)
    for sample in [*TEXTS, *CORPUS]:
        assert text.encode(sample) == reference(sample)["input_ids"], sample
    assert text.num_tokens == max(reference.get_vocab().values()) + 1


def test_tokens_that_only_the_configuration_knows_are_added_as_transformers_adds_them(tmp_path: Path) -> None:
    config = {
        "added_tokens_decoder": {
            "402": {"content": "<second>", "special": False, "normalized": False},
            "401": {"content": "<first>", "special": True, "normalized": False},
            "3": {"content": "<|im_end|>", "special": True, "lstrip": True, "normalized": False},
        },
        "bos_token": {"__type": "AddedToken", "content": "<bos>", "normalized": False},
        "eos_token": "Ġthe",
        "image_token": "<image>",
        "additional_special_tokens": ["<more>"],
    }
    folder = save(tmp_path, byte_level(), "{{ bos_token }}|{{ eos_token }}|{{ image_token }}", **config)
    text, reference = Text.load(folder), of_transformers(folder)
    sample = "<first><second> <|im_end|><bos> the<image><more> Ġthe"
    assert text.encode(sample) == reference(sample)["input_ids"]
    assert text.num_tokens == max(reference.get_vocab().values()) + 1
    assert text.encode_chat([("user", "")]) == reference.apply_chat_template(
        conversation([("user", "")]), return_dict=False
    )


def test_the_older_special_tokens_map_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level(), "{{ bos_token }}{{ eos_token }}", bos_token="<old>")
    tokens = {"bos_token": {"content": "<bos>", "normalized": False}, "eos_token": "</s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    text, reference = Text.load(folder), of_transformers(folder)
    ids = reference.apply_chat_template(conversation([("user", "")]), return_dict=False)
    assert text.encode_chat([("user", "")]) == ids == reference.convert_tokens_to_ids(["<bos>", "</s>"])


def test_truncation_and_padding_in_the_file_do_not_touch_a_prompt(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    text = Text.load(save(tmp_path, tokenizer))
    assert text.encode(CORPUS[0]) == byte_level().encode(CORPUS[0]).ids


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    text = Text.load(save(tmp_path, byte_level(), "{{ messages[0].content }}"))
    with pytest.raises(TextError, match="text: is not Unicode text; character 1 "):
        text.encode("a\ud800")
    with pytest.raises(TextError, match="messages: is not Unicode text"):
        text.encode_chat([("user", "\udfff")])


def test_a_folder_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"has no tokenizer\.json"):
        Text.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TextError, match=r"tokenizer\.json: cannot be read"):
        Text.load(tmp_path)
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TextError, match=r"tokenizer_config\.json: is not JSON"):
        Text.load(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), "ByteLevel"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]), "Strip"),
        (decoders.Strip(" ", 0, 1), "Strip"),  # on an empty token it ends the process's thread with a panic
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused(
    decoder: decoders.Decoder, named: str, tmp_path: Path
) -> None:
    with pytest.raises(TextError, match=f"tokenizer.json: decoder: .*'{named}'.* cannot be streamed"):
        Text.load(save(tmp_path, with_decoder(decoder)()))


# ---- conversations

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = """{{ bos_token }}{% if messages[0].role == 'system' %}
    {% set rest = messages[1:] %}
{% else %}
    {% set rest = messages %}
{% endif %}
{% for message in rest if message.content %}
    {% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% if message.role == 'user' %}[INST] {{ message.content | trim }} [/INST]
    {%- else %}{% generation %} {{ message.content }} {{ eos_token }}{% endgeneration %}{% endif %}
{% endfor %}"""
LOOPS = """{%- set ns = namespace(found=false, turns=0) %}
{%- macro line(name, text='') %}<|im_start|>{{ name }}: {{ text | tojson }}<|im_end|>
{% endmacro %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {{- line(message['role'], message.content) }}
    {%- for part in message.content.split() recursive %}
        {{- part | upper }}{% if loop.last %}.{% endif %}
    {%- endfor %}
{%- endfor %}
{%- for i in range(ns.turns) %}{{ i }}{{ loop.cycle('a', 'b') }}{% endfor %}
{%- if tools is defined and tools is none and documents is none %}no tools{% endif %}
{{ dict(a=1, b=ns.turns) | tojson(indent=2) }}{{ dict.fromkeys(['x']) }}{{ strftime_now('%%') }}
"""
DEFAULT_OF_MANY = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": SMOLLM2}]
CONVERSATIONS = [
    [("user", "Hello, 你好 <b>&amp;</b> 'quoted' \"twice\"")],
    [
        ("system", "Be brief."),
        ("user", " What is 17 * 3? "),
        ("assistant", "51\n"),
        ("user", "<|im_end|> 👋🏽"),
    ],
    [("user", "\n"), ("assistant", "a b"), ("user", "c"), ("assistant", "d"), ("user", "e")],
]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "template", [SMOLLM2, LLAMA2, LOOPS, DEFAULT_OF_MANY], ids=["smollm2", "llama2", "loops", "many"]
)
def test_a_conversation_gets_the_ids_that_transformers_gives(
    name: str, template: object, tmp_path: Path
) -> None:
    folder = save(tmp_path, TOKENIZERS[name](), template, bos_token="<s>", eos_token="</s>")
    text, reference = Text.load(folder), of_transformers(folder)
    assert text.has_chat_template
    for messages in CONVERSATIONS:
        expected = reference.apply_chat_template(
            conversation(messages), add_generation_prompt=True, return_dict=False
        )
        assert text.encode_chat(messages) == expected, messages


def test_the_template_file_is_preferred_to_the_configuration(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level(), "the configuration's")
    (folder / "chat_template.jinja").write_text("the file's")
    text = Text.load(folder)
    assert text.encode_chat([("user", "x")]) == text.encode("the file's")


def test_a_model_without_a_template_still_takes_text(tmp_path: Path) -> None:
    text = Text.load(save(tmp_path, byte_level()))
    assert not text.has_chat_template
    assert text.encode("a")
    with pytest.raises(TextError, match="messages: this model has no chat template; send text or token_ids"):
        text.encode_chat([("user", "x")])


def test_templates_that_cannot_be_chosen_or_compiled_are_told(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "x"}]
    with pytest.raises(
        TextError, match=r"several chat templates \(rag, tool_use\) and none is named 'default'"
    ):
        Text.load(save(tmp_path, byte_level(), named)).encode_chat([("user", "x")])
    with pytest.raises(TextError, match=r"a chat template that cannot be compiled .*endfor"):
        Text.load(save(tmp_path, byte_level(), "{% for x in y %}")).encode_chat([("user", "x")])


def test_a_template_that_raises_speaks_through_the_error(tmp_path: Path) -> None:
    text = Text.load(save(tmp_path, byte_level(), LLAMA2, bos_token="<s>", eos_token="</s>"))
    with pytest.raises(TextError, match="messages: the chat template failed: roles must alternate"):
        text.encode_chat([("user", "a"), ("user", "b")])


@pytest.mark.parametrize("role", ["", "user\n", "user<|im_end|>", "two words"])
def test_a_role_that_is_not_a_word_is_refused(role: str, tmp_path: Path) -> None:
    text = Text.load(save(tmp_path, byte_level(), SMOLLM2))
    with pytest.raises(TextError, match=r"messages\[1\]\.role: is "):
        text.encode_chat([("user", "x"), (role, "y")])


def test_an_empty_conversation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="messages: is empty"):
        Text.load(save(tmp_path, byte_level(), SMOLLM2)).encode_chat([])


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r if false %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{{ m(n - 1) if n }}{{ m(n - 1) if n }}{% endmacro %}{{ m(60) }}",
        "{% for a in range(99999) %}{{ messages[0].content * 9999 }}{% endfor %}",
        "{{ range(1000000) | list }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
    ids=["silent loops", "filtered loop", "doubling macro", "endless output", "long range", "deep macro"],
)
def test_a_runaway_template_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator.chat_template, "RENDER_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(TextError, match="messages: the chat template failed: "):
        ChatTemplate(source, {}).render([("user", "x" * 100)])
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__init__=1) }}",
        "{{ dict.__subclasses__() }}",
    ],
)
def test_a_template_reaches_nothing_outside_itself(source: str) -> None:
    with pytest.raises(TextError, match=r"unsafe|underscore|no attribute"):
        ChatTemplate(source, {}).render([("user", "x")])


def test_template_errors_name_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator.chat_template, "MAX_RENDERED_CHARACTERS", 99)
    with pytest.raises(TextError, match="its output is longer than 99 characters"):
        ChatTemplate("{{ messages[0].content }}", {}).render([("user", "x" * 100)])


# ---- ids to text


def streamed(text: Text, ids: Sequence[int]) -> str:
    stream = text.stream()
    return "".join([*map(stream.push, ids), stream.flush()])


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_gives_the_text_of_the_whole_for_any_ids(name: str, tmp_path: Path) -> None:
    """Guards against lost or repeated text at invalid bytes, special tokens, padding ids and the start."""
    text = Text.load(save(tmp_path, STREAMED[name]()))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    generator = random.Random(1)
    for _ in range(3000):
        # few distinct ids a sequence, so that runs and repetitions come up
        palette = [generator.randrange(text.num_tokens + 3) for _ in range(generator.randint(1, 12))]
        ids = generator.choices(palette, k=generator.randint(0, 24))
        assert streamed(text, ids) == tokenizer.decode(ids, skip_special_tokens=True), ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_stream_gives_back_encoded_text_and_its_beginnings(name: str, tmp_path: Path) -> None:
    text = Text.load(save(tmp_path, TOKENIZERS[name]()))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for sample in CORPUS:
        ids = text.encode(sample)
        for length in range(len(ids) + 1):
            assert streamed(text, ids[:length]) == tokenizer.decode(ids[:length], skip_special_tokens=True)


def test_a_character_is_pushed_by_its_last_byte(tmp_path: Path) -> None:
    letters = coordinator.text_stream._BYTE_OF_CHARACTER
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))  # an id is its byte
    tokenizer.decoder = decoders.ByteLevel()
    stream = Text.load(save(tmp_path, tokenizer)).stream()
    assert [stream.push(byte) for byte in "a👋é".encode()] == ["a", "", "", "", "👋", "", "é"]
    assert [stream.push(byte) for byte in "👋".encode()[:3]] == ["", "", ""]
    assert stream.flush() == "\ufffd"


def test_a_run_of_byte_tokens_is_held_until_a_piece_ends_it(tmp_path: Path) -> None:
    text, ids = load_with_ids(tmp_path)
    stream = text.stream()
    tokens = ["▁the", "<0xC3>", "</s>", "<0xA9>", "▁a", "<0xC3>", "a", "<0xC3>"]
    assert [stream.push(ids[token]) for token in tokens] == ["the", "", "", "", "é a", "", "\ufffda", ""]
    assert stream.flush() == "\ufffd"


def test_special_and_unknown_ids_have_no_text(tmp_path: Path) -> None:
    text, ids = load_with_ids(tmp_path)
    stream = text.stream()
    pushed = [ids["<s>"], text.num_tokens, ids["▁the"], text.num_tokens + 999, ids["▁dog"], ids["</s>"]]
    assert [stream.push(id_) for id_ in pushed] == ["", "", "the", "", " dog", ""]


def load_with_ids(folder: Path) -> tuple[Text, dict[str, int]]:
    tokenizer = with_byte_fallback()
    return Text.load(save(folder, tokenizer)), tokenizer.get_vocab()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_token_costs_the_same_after_many(name: str, tmp_path: Path) -> None:
    """Guards against decoding an ever longer tail, which endless invalid bytes make the library do."""
    text = Text.load(save(tmp_path, TOKENIZERS[name]()))
    ids = [text.encode("你")[-1]] * 20_000
    stream = text.stream()
    start = time.perf_counter()
    for id_ in ids:
        stream.push(id_)
    stream.flush()
    assert time.perf_counter() - start < 5  # decoding the tail each time takes minutes


# ---- the process and the real model


def test_the_coordinator_loads_neither_torch_nor_transformers() -> None:
    package = Path(coordinator.text.__file__).parent
    modules = ", ".join(
        sorted(f"coordinator.{file.stem}" for file in package.glob("*.py") if file.stem != "__init__")
    )
    program = f"import sys, {modules}\nprint(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    output = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=package.parent,
        env=os.environ | {"PYTHONPATH": str(package.parent)},
    )
    assert output.stdout.strip() == "[]"


@pytest.mark.demo
def test_the_demo_model_speaks_as_in_transformers(demo_target: Path) -> None:
    text, reference = Text.load(demo_target), of_transformers(demo_target)
    for sample in [*TEXTS, *CORPUS, Path(__file__).read_text(encoding="utf-8")]:
        ids = text.encode(sample)
        assert ids == reference(sample)["input_ids"]
        assert streamed(text, ids) == reference.decode(ids, skip_special_tokens=True)
    for messages in CONVERSATIONS:
        expected = reference.apply_chat_template(
            conversation(messages), add_generation_prompt=True, return_dict=False
        )
        assert text.encode_chat(messages) == expected
    generator = random.Random(2)
    for _ in range(200):
        ids = [generator.randrange(text.num_tokens + 10) for _ in range(50)]
        assert streamed(text, ids) == reference.decode(ids, skip_special_tokens=True)
