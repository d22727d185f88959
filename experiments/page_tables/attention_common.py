"""What the tables of attention's time share: which paths and files they are of, and how a break-even is said."""

import math
from collections.abc import Iterable, Mapping

import pandas as pd
from scipy.stats import binom

from experiments.page_tables.common import one, rows_of
from experiments.studies import attention_candidates as candidates
from experiments.studies.estimator_speed import break_even_keys, said_break_even
from shadowattn.online.break_even import crossing

EVEN_KEYS = "break-even: the fewest of the measured numbers of keys from which on it is faster"
EVEN = "break-even: share of the keys above which dense attention is faster"
ESTIMATORS = ("int8_fused", "hierarchical")
LOOKED, FLAT = "total (hierarchical), per row", "total (int8_fused), per row"
TOTALS = (FLAT, LOOKED)
WHOLE_PATHS = {"own dense": "our dense attention", FLAT: "`int8_fused`", LOOKED: "`hierarchical`"}
FIRST_LOOK = {0.05: "first_look_speed_05", 0.1: "first_look_speed_1", 0.2: "first_look_speed_2"}
# Times faster than our own dense attention at 8192 keys, by dtype and retention.
PER_ROW_TARGETS = {
    ("float32", 0.05): 4.0,
    ("float32", 0.1): 3.0,
    ("float32", 0.2): 2.0,
    ("bfloat16", 0.05): 3.0,
    ("bfloat16", 0.1): 2.2,
    ("bfloat16", 0.2): 1.5,
}
ACTIVATIONS_AMX, STAGES_AMX = "study_activation_speed_smollm2_amx", "attention_stages_8192_amx"
SPEED_AMX = "attention_speed_amx"
SPEED_AMX_AT = {0.05: "attention_speed_amx_05", 0.1: "attention_speed_amx_1", 0.2: SPEED_AMX}
FIFTH = 0.2
KEEPERS, COMMON_ROWS = 12, 64  # kLeastKeepers on tiles and kCommonRows, as the kernels have them


def even_share(name: str, method: str, shape: str, dtype: str) -> str:
    """Up to which share of 8192 keys a method is faster than our dense attention, by the rows of a file."""
    return said_share(by_retention(name, method, shape, dtype).to_dict())


def even_share_amx(method: str, shape: str, dtype: str, measured: Mapping[float, float]) -> str:
    """The same with AMX, by what was `measured` at some shares; at the others by the run that varies the share."""
    return said_share(by_retention(SPEED_AMX, method, shape, dtype).to_dict() | dict(measured))


def by_retention(name: str, method: str, shape: str, dtype: str) -> pd.Series:
    """Times faster than our dense attention, by retention."""
    rows = rows_of(name)
    rows = rows[(rows.part == "retention") & (rows.metric == "times faster than own dense")]
    of = (rows.method == method) & (rows.dtype == dtype) & (rows.model == shape)
    return rows[of].set_index("retention").value


def said_share(ratios: dict[float, float]) -> str:
    """Up to which share of the keys lists are faster than dense attention, between those measured."""
    shares = sorted(ratios)
    if ratios[shares[0]] < 1 or ratios[shares[-1]] >= 1:
        return f"below {shares[0]:.0%}" if ratios[shares[0]] < 1 else f"above {shares[-1]:.0%}"
    return f"{crossing(shares, [ratios[at] for at in shares]):.0%}"


def both(said: Iterable[str]) -> str:
    """What is said of two paths, in one cell."""
    return " · ".join(one for one in said if one)


def said_least(keys: float, lengths: Iterable[int]) -> str:
    """A break-even among `lengths`; shorter ones were not measured. Empty where there is but one."""
    least, *others = sorted(lengths)
    if not others:
        return ""
    return said_break_even(keys, others[-1]) + (" or fewer" if keys == least else "")


def faster_from(rows: pd.DataFrame, dtype: str, method: str, lengths: list[int]) -> str:
    """The least of `lengths` from which on a method is faster than our dense attention."""
    where = {"dtype": dtype, "method": method, "metric": "times faster than own dense"}
    return said_least(break_even_keys({keys: one(rows, context_tokens=keys, **where) for keys in lengths}), lengths)


def pairs_of_blocks(row: pd.Series, heads: int, retention: float) -> float:
    """Pairs of rows and keys that meet after a first look, in the heads of a chunk that are not spared one."""
    keys = keys_of_blocks(int(row.context_tokens), int(row.chunk_rows), retention)
    return (heads - math.ceil(candidates.LOOKED["flat_share"] * heads)) * candidates.LOOKED["block_rows"] * keys


def keys_of_blocks(keys: int, rows: int, retention: float) -> float:
    """How many keys all blocks of a chunk's rows read together, where those nearest are chosen no more often than others, as on
    random tensors.
    """
    block, through = candidates.LOOKED["block_rows"], candidates.LOOKED["candidates"] * retention
    chosen = sum(math.ceil(through * (keys - rows + last + 1)) for last in range(block - 1, rows, block))
    return chosen + rows // block * (block * (1 - through) + block - 1)  # and the nearest anyway, and all later ones


def read_together(retention: float) -> float:
    """The share of the keys that a block of rows reads together, where rows keep `retention` of them, each for itself."""
    return float(binom.sf(KEEPERS - 1, COMMON_ROWS, retention))


def read_alone(retention: float) -> float:
    """The share of the keys that a row reads alone: it keeps them, and too few of the others of its block do."""
    return retention * float(binom.cdf(KEEPERS - 2, COMMON_ROWS - 1, retention))
