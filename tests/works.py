"""Works to schedule, and plans of them."""

from hypothesis import strategies as st

from shadowattn.online.plan import Launch, Plan, Work

_COSTS = st.one_of(st.integers(0, 9).map(float), st.floats(0, 50))  # small integers tie often


@st.composite
def works(draw, most_heads: int = 7) -> Work:
    """Up to `most_heads` heads, spread over launches."""
    count = draw(st.integers(1, most_heads))
    heads = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=count - 1))) if count > 1 else []
    groups = [tuple(heads[a:b]) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    launches = tuple(Launch(group, draw(_COSTS)) for group in groups)
    costs = [tuple(draw(st.lists(_COSTS, min_size=count, max_size=count))) for _ in range(2)]
    return Work(launches, *costs)


@st.composite
def plans_of(draw, work: Work) -> Plan:
    """Any order of its launches and heads."""
    orders = (draw(st.permutations(range(count))) for count in (len(work.launches), len(work.select_us)))
    return Plan(*map(tuple, orders))
