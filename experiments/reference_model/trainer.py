"""The training loop: batch, loss, step, checkpoint, checks; it stops at any step and resumes from its checkpoint."""

import dataclasses
import logging
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from experiments.reference_model.abilities import Samples, measure_checks
from experiments.reference_model.checkpoint import load_checkpoint, save_checkpoint
from experiments.reference_model.corpus import Batch, build_corpus, draw_batch, training_files
from experiments.reference_model.fast_forward import FastForward
from experiments.reference_model.optimizer import MuonAdamW
from experiments.reference_model.settings import ModelSize, Training
from experiments.reference_model.structured_init import initialise
from experiments.reference_model.tokenizer import load_tokenizer, train_tokenizer
from shadowattn.data.overlap import distinct_runs
from shadowattn.data.stdlib import heldout_text

logger = logging.getLogger(__name__)

# Small enough to cost a few seconds; the card measures more.
_WATCH = Samples(repeat_rows=4, text_rows=4, key_value_documents=20, needle_documents=8, needle_tokens=1024, text_tokens=2048)


class Trainer:
    """A model, its optimizer and its corpus, at the point where the newest checkpoint left them.

    Args:
        settings: the configuration; `output_dir` holds the checkpoint and the tokenizer.
        files: the texts to train on; the standard library's training split when left out.
    """

    def __init__(self, settings: Training, files: Sequence[str] | None = None) -> None:
        self.settings = settings
        self.folder = Path(settings.output_dir)
        self.device = _device(settings.device)
        files = training_files() if files is None else files
        self.tokenizer = self._tokenizer(files)
        self.corpus = build_corpus(files, self.tokenizer)
        self.trained_runs = distinct_runs(files)
        self.heldout = heldout_text(self.trained_runs)
        self.model = self._begun().to(self.device)
        self.forward = FastForward(self.model, compiled=settings.compile)
        self.optimizer = MuonAdamW(
            self.model.named_parameters(),
            matrix_lr=settings.matrix_lr,
            other_lr=settings.other_lr,
            weight_decay=settings.weight_decay,
        )
        self.step, self.tokens_seen, self.seconds, self.history = 0, 0, 0.0, []
        checkpoint = load_checkpoint(self.folder / "checkpoint")
        if checkpoint is not None:
            self._resume(*checkpoint)

    def train(self) -> bool:
        """Train until the configured tokens are seen (True) or an interruption came (False); checkpoint either way."""
        with (
            _Interrupt() as interrupt,
            tqdm(total=self.settings.tokens, initial=self.tokens_seen, unit="tok", unit_scale=True, smoothing=0.05) as bar,
        ):
            while self.tokens_seen < self.settings.tokens and not interrupt.seen:
                before = time.monotonic()
                loss, tokens = self.train_step()
                self.seconds += time.monotonic() - before
                bar.update(tokens)
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                if self.step % self.settings.checks_every_steps == 0:
                    self._watch(loss)
                if self.step % self.settings.checkpoint_every_steps == 0:
                    self.save()
                if self.step == self.settings.stop_after_steps:
                    break
        self.save()
        return self.tokens_seen >= self.settings.tokens

    def train_step(self) -> tuple[float, int]:
        """One optimizer step on the batch that belongs to it; returns its weighted loss and its tokens."""
        batch = self._batch()
        loss = weighted_loss(self.forward, batch, self.device)
        loss.backward()
        self.optimizer.step(self._lr_scale())
        self.step += 1
        self.tokens_seen += batch.weights.numel()
        return loss.item(), batch.weights.numel()

    def save(self) -> None:
        """Write a checkpoint that a new `Trainer` continues from."""
        weights = dict(self.model.named_parameters())
        progress = {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "seconds": self.seconds,
            "history": self.history,
            "settings": dataclasses.asdict(self.settings),
        }
        save_checkpoint(self.folder / "checkpoint", weights=weights, optimizer=self.optimizer.state, progress=progress)

    def _begun(self) -> Qwen2ForCausalLM:
        """A model with the initial weights of the seed, made on the CPU, so that they are the same on every device."""
        torch.manual_seed(self.settings.seed)
        model = build_model(self.settings.model)
        if self.settings.structured_init:
            initialise(model, seed=self.settings.seed)
        return model

    def _resume(self, weights: dict, optimizer: dict, progress: dict) -> None:
        self.model.load_state_dict(weights, strict=False)
        self.step, self.tokens_seen = progress["step"], progress["tokens_seen"]
        self.seconds, self.history = progress["seconds"], progress["history"]
        self.optimizer.load_state(optimizer, self.step)
        logger.info("resumed at step %d, %d tokens", self.step, self.tokens_seen)

    def _tokenizer(self, files: Sequence[str]) -> Qwen2Tokenizer:
        folder = self.folder / "tokenizer"
        if not (folder / "tokenizer.json").exists():
            model = self.settings.model
            train_tokenizer(
                "\n\n".join(files), vocab_size=model.vocab_size, max_tokens=model.max_position_embeddings
            ).save_pretrained(folder)
        return load_tokenizer(folder)

    def _batch(self) -> Batch:
        progress = self.tokens_seen / self.settings.tokens
        stage = next(stage for stage in self.settings.stages if progress < stage.until)
        length = stage.lengths[self.step % len(stage.lengths)]
        return draw_batch(
            self.corpus,
            seed=self.settings.seed,
            step=self.step,
            progress=progress,
            rows=max(1, self.settings.batch_tokens // length),
            length=length,
            mixture=self.settings.mixture,
        )

    def _lr_scale(self) -> float:
        remaining = 1.0 - self.tokens_seen / self.settings.tokens
        return min(1.0, (self.step + 1) / self.settings.warmup_steps, remaining / self.settings.decay_share)

    def _watch(self, loss: float) -> None:
        checks = measure_checks(self.model, self.tokenizer, self.heldout, _WATCH).means()
        self.history.append({"step": self.step, "tokens": self.tokens_seen, "loss": loss, **checks})
        logger.info(
            "%.2fM tokens: repeats %.2f -> %.2f, text %.3f -> %.3f, key-value %.2f, needle %.2f",
            self.tokens_seen / 1e6,
            checks["first_copy_loss"],
            checks["second_copy_loss"],
            checks["early_text_loss"],
            checks["late_text_loss"],
            checks["key_value_accuracy"],
            checks["needle_accuracy"],
        )


def build_model(size: ModelSize) -> Qwen2ForCausalLM:
    """A Qwen2 of the given size with tied embeddings; the end-of-text token has id 0."""
    fields = dataclasses.asdict(size)
    theta = fields.pop("rope_theta")
    return Qwen2ForCausalLM(
        Qwen2Config(
            **fields,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
        )
    )


def weighted_loss(forward: FastForward, batch: Batch, device: torch.device) -> torch.Tensor:
    """The mean loss in nat of the batch's tokens by their weights."""
    ids, weights = batch.ids.to(device), batch.weights.to(device).flatten()
    losses = forward(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    return (losses * weights).sum() / weights.sum()


class _Interrupt:
    """Context manager: SIGINT and SIGTERM are noted instead of raised, so that the running step completes."""

    def __enter__(self) -> "_Interrupt":
        self.seen = False
        self._old = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, *_: object) -> None:
        self.seen = True


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
