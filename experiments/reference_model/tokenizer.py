"""The bundled model's own byte-level BPE: Qwen2's pre-tokenisation, a small vocabulary trained on the corpus."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from shadowattn.data.retrieval import WORDS

END_OF_TEXT = "<|endoftext|>"

# Qwen2's own pattern, so that the tokenizer class that `AutoTokenizer` picks for Qwen2 cuts text the same way.
_WORDS_DIGITS_SPACES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# How often each word of the generated documents joins the tokenizer's text: enough to make a token of every one, so
# that a record's key and value are one token each and matching a key needs one lookup.
_WORD_REPEATS = 1500


def train_tokenizer(text: str, *, vocab_size: int, max_tokens: int) -> Qwen2Tokenizer:
    """A `Qwen2Tokenizer` of `vocab_size` entries learnt from `text` and the retrieval words.

    One end-of-text token serves as beginning, end and padding, as in Qwen2; `max_tokens` becomes `model_max_length`.
    """
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS_DIGITS_SPACES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = " " + " ".join(WORDS)
    raw.train_from_iterator([*text.splitlines(keepends=True), *[words] * _WORD_REPEATS], trainer=trainer)
    learnt = json.loads(raw.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(merge) for merge in learnt["merges"]],
        unk_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_tokens,
    )


def load_tokenizer(folder: Path) -> Qwen2Tokenizer:
    """The tokenizer that an earlier run saved in `folder`."""
    return Qwen2Tokenizer.from_pretrained(folder)
