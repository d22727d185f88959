"""A tokenizer with a chat template, for a model that has none."""


class Chatty:
    """The bundled model's tokenizer with a chat template."""

    def __init__(self, tokenizer):
        self._tokenizer, self.chat_template, self.bos_token_id = tokenizer, "some", None

    def __call__(self, text, **how):
        return self._tokenizer(text, **how)

    def decode(self, ids):
        return self._tokenizer.decode(ids)

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize):
        assert add_generation_prompt
        assert not tokenize
        (message,) = messages
        return f"<{message['role']}>{message['content']}</{message['role']}>\n<assistant>"
