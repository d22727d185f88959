"""What ran when: the record that the executor and the simulator both leave."""

from dataclasses import dataclass

STAGES = ("estimate", "select", "attend")


@dataclass(frozen=True)
class Span:
    """One stage of one launch or head: times in microseconds from the start of the call, and the bytes it read and wrote."""

    stage: str
    heads: tuple[int, ...]
    start_us: float
    end_us: float
    device: str
    bytes: int


@dataclass(frozen=True)
class Timeline:
    """All spans of one layer's call. `measured` says `measured` or `simulated`, as in every row."""

    spans: tuple[Span, ...]
    measured: str

    @property
    def makespan_us(self) -> float:
        """From the first start to the last end."""
        return max(span.end_us for span in self.spans) - min(span.start_us for span in self.spans)
