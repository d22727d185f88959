"""The model card: what was trained, on what, and what the exported weights were measured to do."""

import dataclasses
import itertools
from dataclasses import dataclass

import torch
import transformers

from experiments.environment import describe_machine
from experiments.reference_model.abilities import SHORT_CONTEXT, Checks, Samples
from experiments.reference_model.settings import ModelSize, Training
from experiments.reference_model.targets import TARGETS, Target
from experiments.reference_model.trainer import Trainer
from shadowattn.data.retrieval import RECORD_TEMPLATES, WORDS, asked_words
from shadowattn.evaluation.intervals import Interval

LOSS_CURVE = "loss_curve.png"

# What names a folder or a machine, and so does not belong to the command that made the weights.
_LOCAL_FIELDS = {"output_dir", "export_dir", "export", "threads", "device", "compile", "stop_after_steps", "card_note"}


@dataclass(frozen=True)
class Measured:
    """What was measured on the exported weights: checks, loss (nat) by position, and a text that they wrote.

    `shared`: the share of runs of four lines in the held-out files that also stand in the training text.
    """

    shared: float
    checks: Checks
    samples: Samples
    loss_by_position: list[float]
    generated: str


def render_card(trainer: Trainer, measured: Measured) -> str:
    """The card as Markdown."""
    size = trainer.settings.model
    record = RECORD_TEMPLATES[0].format(key="KEY", value="VALUE").strip()
    parameters = sum(weight.numel() for weight in trainer.model.parameters())
    return f"""# The bundled reference model

A Qwen2 of {parameters / 1e6:.1f} million parameters for studies of sparse attention. Such studies need a model whose loss
falls with longer context and rises when keys are removed, and some of whose heads copy. The training text is Python's
standard library and the retrieval documents of `shadowattn.data.retrieval`; the model is no assistant.

| | |
|---|---|
| architecture | Qwen2: RoPE (theta {size.rope_theta:.0f}), GQA, SwiGLU, RMSNorm, QKV bias, tied embeddings |
| layers, query heads, key-value heads, head dimension | {_shape(size)} |
| hidden size, MLP size | {size.hidden_size}, {size.intermediate_size} |
| context | {size.max_position_embeddings} tokens, trained up to it |
| tokenizer | byte-level BPE of {size.vocab_size} tokens, about 3.3 characters of Python each |
| weights | bfloat16 safetensors |

## What it can do

`experiments/reference_model/abilities.py` measures the exported weights with dense attention in float32. The intervals are 95 %
intervals: Student's over rows or windows, Clopper and Pearson's over documents. A target is met where the whole interval lies
beyond it.

The held-out text is made of standard-library files that are not in the training split. Files repeat one another, and
{measured.shared:.1%} of the runs of four lines in these files also stand in the training text. Files that share more than a tenth
of their runs are left out, and the shared lines are left out of the other files. No run of four lines of the held-out text
therefore stands in the training text (`training_runs.npy` holds the hashes of the training text's runs;
`python -m experiments.reference_model.overlap` compares them). Single lines and names occur in both, as in any two programs.
Training used none of the seeds of the measurements. The words that are asked for were values in training and never keys.

{_check_table(measured.checks, measured.samples)}

Loss on held-out standard-library text by position, nat per token, windows of {len(measured.loss_by_position)} tokens:

{_position_table(measured.loss_by_position)}

## What it cannot do

- Programs: the sample below has the form of Python without its meaning. The model has no facts and follows no requests.
- Natural language beyond docstrings, other programming languages, text that is not ASCII.
- Retrieval in other forms than those of the training. These are records such as `{record}` and needles
  `# note: the word for KEY is VALUE`, with keys and values out of {len(WORDS)} words that are one token each;
  {len(asked_words("evaluation"))} of the words are never a key in training.

## Sample

200 tokens at temperature 0.9 and top-p 0.95, seed 0, after a prompt of five lines; no other seed was tried. At
temperature 0.7 and top-p 0.9 the same prompt soon repeats one line.

```python
{measured.generated.replace("```", "'''").rstrip()}
```

## Training

```
{training_command(trainer.settings)}
```

{_training_facts(trainer)}

![Loss while training, and by position]({LOSS_CURVE})

{_history_table(trainer.history)}
"""


def training_command(settings: Training) -> str:
    """The command that trains these weights: every setting that differs from the default, none that is local."""
    changed = _overrides(dataclasses.asdict(settings), dataclasses.asdict(Training()), "")
    return " ".join(["python -m experiments.train_reference_model", *changed])


def _overrides(ours: dict, default: dict, prefix: str) -> list[str]:
    overrides = []
    for name, value in ours.items():
        if name in _LOCAL_FIELDS or value == default[name]:
            continue
        if isinstance(value, dict):
            overrides += _overrides(value, default[name], f"{prefix}{name}.")
        else:
            overrides.append(f"{prefix}{name}={value}")
    return overrides


def _training_facts(trainer: Trainer) -> str:
    settings, corpus, on = trainer.settings, trainer.corpus, describe_machine()
    facts = [
        f"{trainer.tokens_seen / 1e6:.1f}M of {settings.tokens / 1e6:.1f}M tokens in {trainer.step} steps, seed "
        f"{settings.seed}; {trainer.seconds / 60:.0f} minutes, measurements not counted.",
        f"Machine: {on['processor']}, {on['cores']} cores ({on['torch_cpu_capability']}), shared with other work; "
        f"torch {torch.__version__}, transformers {transformers.__version__}.",
        f"Corpus: the training split of Python's standard library ({len(corpus.tokens) / 1e6:.2f}M tokens, SHA-256 of "
        f"the text `{corpus.sha256}`) and documents generated from the seed. Shares of the rows: {_shares(settings)}.",
        "Loss weights: an answer counts 2, what cannot be predicted (random tokens, the words of a record) 0.1, the rest 1.",
        f"Muon for the hidden matrices (peak {settings.matrix_lr}), AdamW for the rest (peak {settings.other_lr}), "
        f"weight decay {settings.weight_decay}; the rate falls linearly to zero over the last "
        f"{settings.decay_share:.0%}. {settings.batch_tokens} tokens a step; row lengths {_stages(settings)}.",
    ]
    if settings.structured_init:
        facts.append(
            "Structured initial weights (`experiments/reference_model/structured_init.py`): heads 0 and 1 of layer 0 "
            "begin as look-backs by one and two tokens, made by QKV biases; heads 0 and 2 of layers 1 and 2 begin as "
            "induction heads over them; all other output projections begin at zero. Everything is trained from there. "
            "Do not use this model to study how such circuits form."
        )
    if settings.card_note:
        facts.append(settings.card_note)
    return "\n".join(f"- {fact}" for fact in facts)


def _check_table(checks: Checks, samples: Samples) -> str:
    half, means = samples.text_tokens // 2, checks.means()
    blocks = f"{means['first_copy_loss']:.2f} to {means['second_copy_loss']:.2f} nat"
    contexts = f"{means['early_text_loss']:.2f} to {means['late_text_loss']:.2f} nat"
    rows = [
        _check(
            f"repeated random block of {samples.block_tokens} tokens: fall of the loss, first copy to second, {blocks}",
            checks.copy_gain,
            "rows",
            ".1%",
            TARGETS["copy_gain"],
        ),
        _check(
            f"held-out text: fall of the loss of the same tokens from {SHORT_CONTEXT}-{2 * SHORT_CONTEXT} tokens of context to "
            f"{half}-{samples.text_tokens}, {contexts}",
            checks.context_gain,
            "windows",
            ".3f",
            TARGETS["context_gain"],
        ),
        _check(
            f"key-value retrieval, {samples.key_value_pairs} pairs, keys never asked for in training, exact match",
            checks.key_value_accuracy,
            "documents",
            ".1%",
            TARGETS["key_value_accuracy"],
        ),
        _check(
            f"needle in {samples.needle_tokens} tokens of held-out text, all depths, exact match",
            checks.needle_accuracy,
            "documents",
            ".1%",
            TARGETS["needle_accuracy"],
        ),
    ]
    return _table(("check", "measured", "95 % interval", "n", "target", ""), rows)


def _check(meaning: str, measured: Interval, items: str, form: str, target: Target) -> tuple[str, ...]:
    nat = " nat" if target.unit == "nat" else ""
    ends = f"{measured.low:{form}} to {measured.high:{form}}{nat}"
    least = f"{target.value:.2f} nat" if nat else f"{target.value:.0%}"
    return (meaning, f"{measured.value:{form}}{nat}", ends, f"{measured.n} {items}", f"≥ {least}", target.verdict(measured))


def _position_table(loss_by_position: list[float]) -> str:
    edges = (0, 16, 64, 128, 256, 512, 1024, 2048, 4096)
    spans = [span for span in itertools.pairwise(edges) if span[0] < len(loss_by_position)]
    losses = torch.tensor(loss_by_position)
    row = [f"{losses[start:stop].mean():.2f}" for start, stop in spans]
    return _table([f"{start}-{stop}" for start, stop in spans], [row])


def _history_table(history: list[dict]) -> str:
    header = ("tokens (M)", "repeated block (nat)", "held-out text, early to late (nat)", "key-value", "needle in 1024")
    rows = [
        (
            f"{row['tokens'] / 1e6:.1f}",
            f"{row['first_copy_loss']:.2f} to {row['second_copy_loss']:.2f}",
            f"{row['early_text_loss']:.2f} to {row['late_text_loss']:.2f}",
            f"{row['key_value_accuracy']:.0%}",
            f"{row['needle_accuracy']:.0%}",
        )
        for row in history[:: max(1, len(history) // 12)]
    ]
    return "While training, on small samples:\n\n" + _table(header, rows)


def _table(header: list[str] | tuple[str, ...], rows: list) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shape(size: ModelSize) -> str:
    head_dim = size.hidden_size // size.num_attention_heads
    return f"{size.num_hidden_layers}, {size.num_attention_heads} and {size.num_key_value_heads} per layer, {head_dim}"


def _shares(settings: Training) -> str:
    mixture = dataclasses.asdict(settings.mixture)
    shares = {"text": 1.0 - sum(mixture.values()), **mixture}
    return ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in shares.items())


def _stages(settings: Training) -> str:
    return "; ".join(
        f"{' / '.join(str(length) for length in stage.lengths)} until {stage.until:.0%}" for stage in settings.stages
    )
