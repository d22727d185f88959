"""Between text and tokens: the prompt, what ends an answer, and text that appears as it is made."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from shadowattn.engine.text import TextStream, end_tokens, prompt_tokens
from shadowattn.errors import InputError

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>answer:{% endif %}"
)


@pytest.fixture
def tokenizer():
    """A token a byte, two special ones, and a chat template."""
    bytes_ = {symbol: number for number, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    made = Tokenizer(BPE(bytes_, []))
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), ByteDecoder()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    return fast


def test_a_message_is_wrapped_by_the_template_and_plain_text_is_not(tokenizer):
    wrapped = tokenizer.decode(prompt_tokens(tokenizer, "a fox"))
    assert wrapped == "<s>user:a fox</s><s>answer:"
    assert prompt_tokens(tokenizer, "a fox", chat=True) == prompt_tokens(tokenizer, "a fox")
    assert tokenizer.decode(prompt_tokens(tokenizer, "a fox", chat=False)) == "a fox"
    tokenizer.chat_template = None
    assert tokenizer.decode(prompt_tokens(tokenizer, "a fox")) == "a fox"
    with pytest.raises(InputError, match=r"study\.chat: expected a tokenizer with a chat template"):
        prompt_tokens(tokenizer, "a fox", chat=True, setting="study.chat")
    with pytest.raises(InputError, match="prompt: expected text"):
        prompt_tokens(tokenizer, "")


@pytest.mark.parametrize(
    ("of_model", "expected"), [(None, {"</s>"}), ("<s>", {"<s>", "</s>"}), (["<s>", "</s>"], {"<s>", "</s>"})]
)
def test_an_answer_ends_with_what_the_model_and_the_tokenizer_say(tokenizer, of_model, expected):
    number = tokenizer.convert_tokens_to_ids
    eos = None if of_model is None else number(of_model)
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=eos))
    assert end_tokens(model, tokenizer) == {number(name) for name in expected}


def test_characters_appear_whole_and_special_tokens_do_not(tokenizer):
    stream = TextStream(tokenizer)
    tokens = tokenizer("né 🦊!").input_ids
    shown = [stream.add(token) for token in [*tokens, tokenizer.eos_token_id]]
    assert shown == ["n", "", "é", " ", "", "", "", "🦊", "!", ""]
    assert "".join(shown) == stream.text == "né 🦊!"


def test_a_character_that_stays_incomplete_is_shown_at_the_end(tokenizer):
    stream = TextStream(tokenizer)
    shown = [stream.add(token) for token in tokenizer("né🦊").input_ids[:-1]]
    assert shown == ["n", "", "é", "", "", ""]
    assert stream.rest() == "\N{REPLACEMENT CHARACTER}"
    assert "".join(shown) + "\N{REPLACEMENT CHARACTER}" == stream.text
    assert stream.rest() == ""
