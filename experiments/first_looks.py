"""What a first look costs each head of a lab's model: measured once for its settings, kept, and found again."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.progress import bar, say
from shadowattn.offline import observe_first_look
from shadowattn.types import FirstLookLosses, KeyOffset

if TYPE_CHECKING:
    from experiments.lab import Lab


@dataclass(frozen=True)
class FirstLook:
    """The settings of a look, and `windows` of `tokens` tokens of calibration text, read in chunks: every list is made twice and
    weighed against all keys, which takes long.

    `key_offset`: what is taken off K, by name.
    """

    tokens: int
    windows: int
    chunk_tokens: int
    candidates: float
    block_rows: int
    key_offset: str = "none"

    def losses(self, lab: "Lab", key_offset: KeyOffset | None = None) -> FirstLookLosses:
        """Those of every head; `key_offset` is what its name stands for."""

        def measure() -> FirstLookLosses:
            heads = lab.shape.layers * lab.shape.heads
            say(f"first look: {heads} heads on calibration text, {self.windows} × {self.tokens} tokens")
            return observe_first_look(
                lab.loaded.model,
                lab.calibration(tokens=self.tokens, windows=self.windows),
                chunk_tokens=self.chunk_tokens,
                candidates=self.candidates,
                block_rows=self.block_rows,
                key_offset=key_offset,
                progress=lambda work: bar(work, "calibrate"),
            )

        return lab.stage("first_look", vars(self)).result(FirstLookLosses, measure)
