"""What a request may ask for: defaults, limits, and refusals that name the field, the value and the limit."""

import dataclasses
import math
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coordinator.chat_template import ChatTemplate
from coordinator.requests import UNSUPPORTED, Limits, Order, read_request
from coordinator.text import Text
from protos.inference_pb2 import Chat, ChatMessage, GenerateRequest, TokenIds
from protos.status import TaskError
from protos.worker_pb2 import RULE_BLOCK, RULE_TOKEN

LIMITS = Limits(
    vocab_size=256,
    max_length=32,
    max_choices=4,
    max_num_draft_tokens=8,
    default_max_tokens=16,
    num_draft_tokens=3,
    auto_draft_tokens=False,
    rule="token",
)
PROMPT = TokenIds(ids=[5, 0, 255])
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", {})


def one_id_a_byte(template: ChatTemplate | str = TEMPLATE) -> Text:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Text(tokenizer, template)


def read(tokenizer: Text | None = None, **fields: Any) -> Order:
    if not {"token_ids", "text", "chat"} & fields.keys():
        fields["token_ids"] = PROMPT
    return read_request(GenerateRequest(**fields), tokenizer, LIMITS)


def refused(request: GenerateRequest, text: Text | None = None, limits: Limits = LIMITS) -> tuple[str, str]:
    """The field that is blamed, and what is said of it."""
    with pytest.raises(TaskError) as caught:
        read_request(request, text, limits)
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    (details,) = error.details
    assert isinstance(details, BadRequest)
    (violation,) = details.field_violations
    assert error.message == f"{violation.field} {violation.description}"
    return violation.field, violation.description


# ---- defaults and limits


def test_every_default_is_filled_in() -> None:
    order = read()
    assert order.prompt == [5, 0, 255]
    assert (order.max_tokens, order.num_choices, order.num_draft_tokens) == (16, 1, 3)
    assert (order.sampling.temperature, order.sampling.top_k) == (1.0, 0)
    assert (order.sampling.top_p, order.sampling.min_p) == (1.0, 0.0)
    assert not order.ignore_end_tokens


def test_every_field_that_is_given_arrives() -> None:
    order = read(
        request_id="mine",
        max_tokens=7,
        temperature=0.5,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        seed=2**64 - 1,
        n=4,
        num_draft_tokens=8,
        ignore_end_tokens=True,
    )
    assert (order.request_id, order.max_tokens, order.seed) == ("mine", 7, 2**64 - 1)
    assert (order.sampling.temperature, order.sampling.top_k) == (0.5, 40)
    assert (order.sampling.top_p, order.sampling.min_p) == (0.9, 0.05)
    assert (order.num_choices, order.num_draft_tokens, order.ignore_end_tokens) == (4, 8, True)


def test_what_is_given_as_zero_is_not_taken_for_absent() -> None:
    order = read(temperature=0.0, top_k=0, min_p=0.0, seed=0, num_draft_tokens=0)
    assert (order.sampling.temperature, order.seed, order.num_draft_tokens) == (0.0, 0, 0)


def test_requests_without_id_and_seed_get_their_own() -> None:
    orders = [read() for _ in range(50)]
    assert len({order.request_id for order in orders}) == 50
    assert len({order.seed for order in orders}) == 50
    assert all(order.request_id and 0 <= order.seed < 2**64 for order in orders)
    assert max(order.seed for order in orders) > 2**56, "seeds use all their bits"


@pytest.mark.parametrize(
    ("field", "lowest", "highest"),
    [
        ("max_tokens", 1, 32),
        ("temperature", 0.0, 100.0),
        ("top_k", 0, 2**31 - 1),
        ("top_p", math.ulp(0.0), 1.0),
        ("min_p", 0.0, 1.0),
        ("seed", 0, 2**64 - 1),
        ("n", 1, 4),
        ("num_draft_tokens", 0, 8),
    ],
)
def test_both_ends_of_a_range_are_accepted(field: str, lowest: Any, highest: Any) -> None:
    for value in (lowest, highest):
        order = read(**{field: value})
        name = "num_choices" if field == "n" else field
        assert getattr(order, name, None) == value or getattr(order.sampling, name) == value


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("max_tokens", 0, "1..32"),
        ("max_tokens", 33, "1..32"),
        ("max_tokens", 2**32 - 1, "1..32"),
        ("temperature", -1e-9, "from 0 to 100"),
        ("temperature", 100.1, "from 0 to 100"),
        ("temperature", math.nan, "from 0 to 100"),
        ("temperature", math.inf, "from 0 to 100"),
        ("temperature", -math.inf, "from 0 to 100"),
        ("top_k", 2**31, "0..2147483647"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", -0.5, "above 0 and at most 1"),
        ("top_p", 1.0000001, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("min_p", -0.1, "from 0 to 1"),
        ("min_p", 1.1, "from 0 to 1"),
        ("min_p", math.nan, "from 0 to 1"),
        ("n", 0, "1..4"),
        ("n", 5, "1..4"),
        ("num_draft_tokens", 9, "0..8"),
    ],
)
def test_what_lies_outside_its_range_is_refused_with_field_value_and_limit(
    field: str, value: Any, limit: str
) -> None:
    blamed, words = refused(GenerateRequest(token_ids=PROMPT, **{field: value}))
    assert blamed == field
    assert str(value) in words
    assert limit in words


def test_k_is_as_asked_or_open_up_to_a_bound() -> None:
    order = read(auto_draft_tokens=True)
    assert (order.num_draft_tokens, order.auto_draft_tokens) == (8, True)
    order = read(auto_draft_tokens=True, num_draft_tokens=2)
    assert (order.num_draft_tokens, order.auto_draft_tokens) == (2, True)
    for limits, auto in (
        (LIMITS, False),
        (dataclasses.replace(LIMITS, num_draft_tokens=16, auto_draft_tokens=True), True),
    ):
        order = read_request(GenerateRequest(token_ids=PROMPT), None, limits)
        assert order.auto_draft_tokens == auto
        order = read_request(GenerateRequest(token_ids=PROMPT, num_draft_tokens=5), None, limits)
        assert (order.num_draft_tokens, order.auto_draft_tokens) == (5, False)


def test_the_rule_is_the_requests_or_the_deployments() -> None:
    assert [read().rule, read(rule="block").rule] == [RULE_TOKEN, RULE_BLOCK]
    blamed, words = refused(GenerateRequest(token_ids=PROMPT, rule="typical"))
    assert blamed == "rule"
    assert "'typical'" in words
    assert "token, block" in words


def test_a_request_id_has_a_limit() -> None:
    assert read(request_id="ü" * 128).request_id == "ü" * 128
    blamed, words = refused(GenerateRequest(token_ids=PROMPT, request_id="x" * 129))
    assert blamed == "request_id"
    assert "129" in words
    assert "128" in words


# ---- what is not supported


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["\n"]},
        {"stop": [""]},
        {"repetition_penalty": 1.0},
        {"presence_penalty": 0.0},
        {"frequency_penalty": 0.5},
        {"logit_bias": {7: -100.0}},
        {"logprobs": 0},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_an_unsupported_field_is_refused_by_name_even_at_its_neutral_value(fields: dict[str, Any]) -> None:
    (name,) = fields
    assert name in UNSUPPORTED
    blamed, words = refused(GenerateRequest(token_ids=PROMPT, **fields))
    assert blamed == name
    assert "not supported" in words


def test_every_field_of_the_message_is_either_read_or_refused() -> None:
    """Guards against parameters that the API accepts and drops in silence."""
    read_fields = {
        *("request_id", "text", "token_ids", "chat", "max_tokens", "temperature", "top_k", "top_p", "min_p"),
        *("seed", "n", "num_draft_tokens", "ignore_end_tokens", "auto_draft_tokens", "rule", "resume_from"),
    }
    assert read_fields | set(UNSUPPORTED) == {field.name for field in GenerateRequest.DESCRIPTOR.fields}


UNKNOWN_99 = b"\x98\x06\x01"  # field 99, a varint of 1


def test_a_field_of_a_newer_api_is_refused_by_its_number() -> None:
    data = GenerateRequest(token_ids=PROMPT).SerializeToString() + UNKNOWN_99
    blamed, words = refused(GenerateRequest.FromString(data))
    assert blamed == "field 99 of GenerateRequest"
    assert "not known" in words


def test_a_newer_field_deep_inside_is_refused_too() -> None:
    ids = TokenIds.FromString(PROMPT.SerializeToString() + UNKNOWN_99)
    assert refused(GenerateRequest(token_ids=ids))[0] == "field 99 of TokenIds"
    message = ChatMessage.FromString(ChatMessage(role="user").SerializeToString() + UNKNOWN_99)
    chat = Chat(messages=[ChatMessage(role="user"), message])
    assert refused(GenerateRequest(chat=chat), one_id_a_byte())[0] == "field 99 of ChatMessage"


# ---- prompts


def test_a_request_without_a_prompt_is_refused() -> None:
    blamed, words = refused(GenerateRequest())
    assert blamed == "prompt"
    assert all(kind in words for kind in ("text", "token_ids", "chat"))


@pytest.mark.parametrize("token", [256, 2**32 - 1])
def test_a_token_id_outside_the_vocabulary_is_refused(token: int) -> None:
    blamed, words = refused(GenerateRequest(token_ids=TokenIds(ids=[1, token])))
    assert blamed == "token_ids.ids"
    assert str(token) in words
    assert "256" in words


def test_token_id_0_is_a_token() -> None:
    assert read(token_ids=TokenIds(ids=[0])).prompt == [0]


@pytest.mark.parametrize("length", [1, 31])
def test_a_prompt_may_leave_room_for_a_single_token(length: int) -> None:
    assert len(read(token_ids=TokenIds(ids=[7] * length)).prompt) == length


@pytest.mark.parametrize("length", [0, 32, 33])
def test_a_prompt_that_is_empty_or_fills_the_context_is_refused(length: int) -> None:
    blamed, words = refused(GenerateRequest(token_ids=TokenIds(ids=[7] * length)))
    assert blamed == "token_ids"
    assert str(length) in words
    assert "1 to 31" in words


@pytest.mark.parametrize(
    "prompt", [{"text": "hi"}, {"chat": Chat(messages=[ChatMessage(role="user", content="hi")])}]
)
def test_text_without_a_tokenizer_is_refused_by_the_prompt_s_kind(prompt: dict[str, Any]) -> None:
    blamed, words = refused(GenerateRequest(**prompt))
    assert blamed == next(iter(prompt))
    assert "tokenizer" in words
    assert "token_ids" in words


def test_text_is_tokenised_as_it_is() -> None:
    text = one_id_a_byte()
    assert read(text, text="naïve").prompt == text.encode("naïve")
    assert len(read(text, text="naïve").prompt) == 6


def test_a_conversation_goes_through_the_template() -> None:
    text = one_id_a_byte()
    chat = Chat(messages=[ChatMessage(role="system", content="a"), ChatMessage(role="user", content="b")])
    assert read(text, chat=chat).prompt == text.encode("system:a;user:b;")


def test_text_that_fills_the_context_is_refused_as_text() -> None:
    assert refused(GenerateRequest(text="x" * 32), one_id_a_byte())[0] == "text"
    assert refused(GenerateRequest(text=""), one_id_a_byte())[0] == "text"
    long = Chat(messages=[ChatMessage(role="user", content="x" * 32)])
    assert refused(GenerateRequest(chat=long), one_id_a_byte())[0] == "chat"


def test_a_conversation_that_cannot_be_rendered_names_its_part() -> None:
    text = one_id_a_byte()
    assert refused(GenerateRequest(chat=Chat()), text)[0] == "messages"
    forged = Chat(messages=[ChatMessage(role="user"), ChatMessage(role="a b")])
    blamed, words = refused(GenerateRequest(chat=forged), text)
    assert blamed == "messages[1].role"
    assert "'a b'" in words
    without = one_id_a_byte("no chat template")
    asked = GenerateRequest(chat=Chat(messages=[ChatMessage(role="user")]))
    assert refused(asked, without) == (
        "messages",
        "this model has no chat template; send text or token_ids",
    )


def test_a_text_s_ids_lie_inside_the_vocabulary_too() -> None:
    """A tokenizer may know more ids than the model: the model must never be fed one."""
    small = dataclasses.replace(LIMITS, vocab_size=10)
    blamed, words = refused(GenerateRequest(text="~"), one_id_a_byte(), small)
    assert blamed == "text"
    assert "10" in words
