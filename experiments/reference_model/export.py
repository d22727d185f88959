"""The exported model folder: weights in bfloat16, tokenizer, loss curve and card."""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

from experiments.reference_model.abilities import Samples, heldout_loss_by_position, measure_checks
from experiments.reference_model.card import LOSS_CURVE, Measured, render_card
from experiments.reference_model.checkpoint import replacing
from experiments.reference_model.trainer import Trainer, build_model
from shadowattn.data.overlap import shared_fraction
from shadowattn.data.stdlib import stdlib_text
from shadowattn.data.text import TRAINING_RUNS

_PROMPT = "import os\nimport sys\n\n\nclass Parser:\n"
_SAMPLE_TOKENS = 200
_LONG_ROWS = 0  # all held-out text once, so that positions differ by context more than by text


def export_model(trainer: Trainer, folder: Path, *, samples: Samples | None = None) -> Measured:
    """Replace `folder` by the trainer's current model with its card; returns what the card says was measured.

    All numbers are measured on the bfloat16 weights that are written, computed in float32.
    """
    samples = samples or Samples()
    size = trainer.settings.model
    model = build_model(size)
    model.load_state_dict(trainer.model.state_dict())
    model.to(torch.bfloat16)
    model.config.pad_token_id = model.generation_config.pad_token_id = trainer.tokenizer.pad_token_id
    with replacing(folder) as new:
        model.save_pretrained(new)
        trainer.tokenizer.save_pretrained(new)
        np.save(new / TRAINING_RUNS.name, trainer.trained_runs)
        # Read back, not cast back: a cast to bfloat16 also rounds RoPE's frequencies, which the folder does not hold.
        model = Qwen2ForCausalLM.from_pretrained(new, dtype=torch.float32).eval()
        long_rows = dataclasses.replace(samples, text_tokens=size.max_position_embeddings, text_rows=_LONG_ROWS)
        measured = Measured(
            shared=shared_fraction(stdlib_text("heldout"), trainer.trained_runs),
            checks=measure_checks(model, trainer.tokenizer, trainer.heldout, samples),
            samples=samples,
            loss_by_position=heldout_loss_by_position(model, trainer.tokenizer, trainer.heldout, long_rows).tolist(),
            generated=_generate(model, trainer.tokenizer),
        )
        _draw(trainer.history, measured.loss_by_position, new / LOSS_CURVE)
        (new / "README.md").write_text(render_card(trainer, measured), encoding="utf-8")
    return measured


def _generate(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> str:
    ids = tokenizer(_PROMPT, return_tensors="pt")
    count = {"min_new_tokens": _SAMPLE_TOKENS, "max_new_tokens": _SAMPLE_TOKENS}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        out = model.generate(**ids, **count, do_sample=True, temperature=0.9, top_p=0.95, top_k=0)
    return tokenizer.decode(out[0], skip_special_tokens=True)


def _draw(history: list[dict], loss_by_position: list[float], path: Path) -> None:
    figure = Figure(figsize=(9, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    tokens = [row["tokens"] / 1e6 for row in history]
    for name, label in (
        ("early_text_loss", "held-out text, 64-128 tokens of context"),
        ("late_text_loss", "same tokens, 1024-2048 tokens of context"),
        ("second_copy_loss", "second copy of a random block"),
    ):
        left.plot(tokens, [row[name] for row in history], label=label)
    left.set(xlabel="tokens seen (million)", ylabel="loss (nat per token)")
    left.legend(fontsize=7)
    width = max(1, len(loss_by_position) // 64)
    starts = range(0, len(loss_by_position) - width + 1, width)
    right.plot(
        [start + width / 2 for start in starts],
        [sum(loss_by_position[start : start + width]) / width for start in starts],
    )
    right.set(xlabel="position", ylabel="held-out loss (nat per token)")
    figure.savefig(path, dpi=120)
