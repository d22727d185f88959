"""What a scheduler is given and what it answers: the costs of one layer's heads, and the order to run them in (section 3.4)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Heads that may share a launch, before anyone asks its cost. `bucket` is a slot of the bank; −1: there are none."""

    heads: tuple[int, ...]
    bucket: int = -1


@dataclass(frozen=True)
class Launch:
    """Heads that go through one launch of the estimate; `heads` are indices into the work's heads."""

    heads: tuple[int, ...]
    estimate_us: float


@dataclass(frozen=True)
class Work:
    """One layer's heads for one chunk of rows: what each launch of the estimate costs, and each head's selection and attention.

    Every head is in exactly one launch.
    """

    launches: tuple[Launch, ...]
    select_us: tuple[float, ...]  # [H]
    attend_us: tuple[float, ...]  # [H]


@dataclass(frozen=True)
class Plan:
    """An order: of the launches on the device, and of the heads in selection and attention.

    Selection and attention take the heads in that order, whatever the device has done already: a head whose launch comes late
    holds up the heads behind it, and the scores of those that were launched stay in memory.
    """

    launches: tuple[int, ...]
    heads: tuple[int, ...]

    def launched_as_wanted(self, work: Work) -> "Plan":
        """The same order of heads, each launch when the first head of it is next.

        No more scores wait. By `makespan`, whose queues hold every head, none is taken later: those of the heads up to it come
        before it in any order. A queue that is full may delay a launch that was to come earlier.
        """
        place = {head: at for at, head in enumerate(self.heads)}
        first = [min(place[head] for head in launch.heads) for launch in work.launches]
        return Plan(tuple(sorted(self.launches, key=first.__getitem__)), self.heads)

    def launch_by_launch(self, work: Work) -> "Plan":
        """The same order of launches, and of the heads of each, which no head of another comes between."""
        place = {head: at for at, head in enumerate(self.heads)}
        heads = (head for launch in self.launches for head in sorted(work.launches[launch].heads, key=place.__getitem__))
        return Plan(self.launches, tuple(heads))
