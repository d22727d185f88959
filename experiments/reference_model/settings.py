"""The training run's configuration: every number that changes the trained weights."""

from dataclasses import dataclass, field

from experiments.reference_model.corpus import Mixture


@dataclass
class ModelSize:
    """The Qwen2 fields that size the model."""

    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    vocab_size: int = 2560
    max_position_embeddings: int = 4096
    rope_theta: float = 1.0e6


@dataclass
class Stage:
    """Row lengths, drawn evenly, while the share of the tokens seen is below `until`."""

    until: float
    lengths: list[int]


def _stages() -> list[Stage]:
    return [
        Stage(until=0.03, lengths=[128]),
        Stage(until=0.6, lengths=[256, 256, 512]),
        Stage(until=0.85, lengths=[256, 512, 512, 1024]),
        Stage(until=1.0, lengths=[512, 1024, 2048, 4096]),
    ]


@dataclass
class Training:
    """All that changes the trained weights, and where they go."""

    model: ModelSize = field(default_factory=ModelSize)
    mixture: Mixture = field(default_factory=Mixture)
    stages: list[Stage] = field(default_factory=_stages)
    structured_init: bool = True
    seed: int = 0
    tokens: int = 24_000_000
    batch_tokens: int = 8192
    matrix_lr: float = 0.02
    other_lr: float = 2.0e-3
    weight_decay: float = 0.1
    warmup_steps: int = 60
    decay_share: float = 0.45  # of the tokens, at the end, over which the learning rate falls to zero
    checkpoint_every_steps: int = 100
    checks_every_steps: int = 150
    device: str = "auto"
    compile: bool = True  # pays off after about two minutes; needs a C++ compiler
    threads: int | None = None
    output_dir: str = "outputs/reference_model"
    export_dir: str = "shadowattn/models/bundled"
    export: bool = False
    card_note: str = ""  # what the card should say about this run that its settings do not
    stop_after_steps: int | None = None  # end early with a checkpoint, as an interruption would
