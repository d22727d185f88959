"""What a first look costs each head of a lab's model: measured once for its settings, kept, and found again."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from experiments.progress import bar, say
from shadowattn.artifacts import content_hash
from shadowattn.offline import observe_first_look
from shadowattn.types import FirstLookLosses, KeyOffset

if TYPE_CHECKING:
    from experiments.lab import Lab


@dataclass(frozen=True)
class FirstLook:
    """The settings of a look, and `windows` of `tokens` tokens of calibration text, read in chunks: every list is made twice and
    weighed against all keys, which takes long.
    """

    tokens: int
    windows: int
    chunk_tokens: int
    candidates: float
    block_rows: int

    def losses(self, lab: "Lab", key_offset: KeyOffset | None = None) -> FirstLookLosses:
        """Those of every head, where `key_offset` is taken off K. Its values count: what it was measured on may be other text."""

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

        offset = "none" if key_offset is None else content_hash(asdict(key_offset))
        return lab.stage("first_look", vars(self) | {"key_offset": offset}).result(FirstLookLosses, measure)
