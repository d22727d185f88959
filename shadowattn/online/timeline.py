"""What ran when: the record that the executor and the simulator both leave, and all that their interfaces have in common."""

from collections.abc import Mapping
from dataclasses import dataclass

STAGES = ("estimate", "select", "attend")


@dataclass(frozen=True)
class Span:
    """One stage of one launch or head: times in microseconds from the start of the call, and the bytes it read and wrote.

    `heads` are places in the call's tensors. Bytes count every operand once, and K and V once for each entry of a list.
    Simulated spans have none.
    """

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

    def busy_us(self, stage: str) -> float:
        """How long a stage was at work."""
        return sum(span.end_us - span.start_us for span in self.spans if span.stage == stage)


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict:
    """Timelines by name in the trace event format, which chrome://tracing and Perfetto open: a process each, a thread a stage."""
    events = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append(_label("process_name", process, 0, f"{name} ({timeline.measured})"))
        events += [_label("thread_name", process, thread, stage) for thread, stage in enumerate(STAGES)]
        for span in timeline.spans:
            events.append(
                {
                    "name": f"{span.stage} {', '.join(map(str, span.heads))}",
                    "cat": span.stage,
                    "ph": "X",  # a complete event: start and duration, in microseconds
                    "ts": span.start_us,
                    "dur": span.end_us - span.start_us,
                    "pid": process,
                    "tid": STAGES.index(span.stage),
                    "args": {"heads": list(span.heads), "device": span.device, "bytes": span.bytes},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _label(kind: str, process: int, thread: int, name: str) -> dict:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
