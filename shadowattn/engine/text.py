"""Between text and token ids: a prompt, the tokens that end an answer, and text as it is made."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shadowattn.errors import InputError


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool | None = None, setting: str = "chat") -> list[int]:
    """Token ids of a prompt: of a message by the model's chat template, or of plain text, with one beginning token where the
    tokenizer puts one. `chat` None: by the template where there is one; errors about it name `setting`.
    """
    if not text:
        raise InputError("prompt: expected text, got none")
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not chat:
        return list(tokenizer(text, verbose=False).input_ids)
    return list(tokenizer(chat_opening(tokenizer, text, setting=setting), add_special_tokens=False, verbose=False).input_ids)


def chat_opening(tokenizer: PreTrainedTokenizerBase, message: str, *, setting: str = "chat") -> str:
    """The beginning of the reply to a message, by the model's own template. Raises `InputError`, which names `setting`."""
    if tokenizer.chat_template is None:
        raise InputError(f"{setting}: expected a tokenizer with a chat template, got one without; use {setting}=false")
    return tokenizer.apply_chat_template([{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end an answer, by the model's generation settings and its tokenizer."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return frozenset(int(end) for end in (*ends, tokenizer.eos_token_id) if end is not None)


class TextStream:
    """Text of tokens that come one by one: `add` returns what is new of it, whole characters only."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer, self._tokens, self._shown = tokenizer, [], 0

    def add(self, token: int) -> str:
        """The text that this token adds; nothing while a character is incomplete."""
        self._tokens.append(token)
        text = self.text
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new, self._shown = text[self._shown :], len(text)
        return new

    def rest(self) -> str:
        """What `add` held back when there were no more tokens: a character that stayed incomplete."""
        text = self.text
        new, self._shown = text[self._shown :], len(text)
        return new

    @property
    def text(self) -> str:
        """All of it, special tokens left out."""
        return self._tokenizer.decode(self._tokens, skip_special_tokens=True)
