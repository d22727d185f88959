"""Automatic warnings: a sparse method that beats dense, a dense model that knows too little to lose anything, a task that dense
attention cannot do, an estimate that finds fewer of the exact top-k than the authors' tool asks for."""

import math
from collections.abc import Collection

import pandas as pd
from scipy import stats

from shadowattn.evaluation.comparison import LEVEL
from shadowattn.evaluation.intervals import Interval
from shadowattn.evaluation.recall import TARGET_MEAN, TARGET_WORST_HEAD
from shadowattn.reporting.style import ALL_KEYS

EQUAL_DENSITY = 0.01  # densities that differ by no larger share are equal
ABOVE_DENSE = "above dense attention"
LEAST_SCORE = 0.05  # a task on which dense attention scores less tells nothing of a method
NOT_CLAIMED = "no difference is claimed"
SAME = "no difference can be shown"
UNUSED = "the sparse path was not used: every head went dense"
OVERLAPS = ("topk_overlap", "worst_head_overlap", "row_overlap")  # metrics that `quality_flag` takes
# Losses that differ by less are equal: another order of summation moves them as far.
_ROUNDING_NAT = 1e-5
# Share of the unigram loss that a dense model must get below before its losses mean anything.
_FLOOR_SHARE = 0.9


def quality_flag(
    *,
    loss: float,
    dense_loss: float,
    floor_loss: float,
    windows: int,
    increase_error: float,
    method: str = "sparse",
    topk_overlap: float | None = None,
    worst_head_overlap: float | None = None,
    row_overlap: float | None = None,
) -> str:
    """The flag of a perplexity row; losses in nat, `floor_loss` that of a unigram model on the same text.

    `increase_error`: the standard error of the loss above dense, of so many `windows`; not a number for one. A method beats dense
    where Student's 95 % interval holds no zero. `method`: what the flag calls it. `topk_overlap`: share of the exact top-k that
    it found, `worst_head_overlap`: that of the head served worst; None: not measured.
    `row_overlap`: share of each row's own exact top-k that is on a list of several rows; None: lists are rows' own.
    """
    flags, increase = [], loss - dense_loss
    if abs(increase) > _ROUNDING_NAT:
        reach = float(stats.t.ppf(1 - LEVEL / 2, windows - 1)) * increase_error if windows > 1 else math.nan
        if not abs(increase) > reach:
            flags.append(SAME)
        elif increase < 0:
            flags.append(f"{method} beats dense")
    if dense_loss > _FLOOR_SHARE * floor_loss:
        flags.append(f"dense near the floor (unigram perplexity {math.exp(floor_loss):.1f})")
    if topk_overlap is not None and topk_overlap < TARGET_MEAN:
        flags.append(f"top-k overlap below {TARGET_MEAN:.2f}")
    if worst_head_overlap is not None and worst_head_overlap < TARGET_WORST_HEAD:
        flags.append(f"top-k overlap of the worst head below {TARGET_WORST_HEAD:.2f}")
    if row_overlap is not None and row_overlap < TARGET_MEAN:
        flags.append(f"overlap with rows' own top-k below {TARGET_MEAN:.2f}")
    return "; ".join(flags)


def quality_flags(rows: pd.DataFrame) -> pd.Series:
    """The flag of every row, where it is one of a loss by `quality_flag` from the values of the rows themselves: a check of
    published rows, and what those get that are older than a flag. `rows` of one quality study; others keep what they have.
    """
    flags = rows.flag.fillna("").copy()
    if not {"dense", "unigram_loss"} <= {*rows.method, *rows.metric}:
        return flags
    values = rows.drop_duplicates(["metric", "method", "retention"]).set_index(["metric", "method", "retention"]).value
    dense, floor = values["loss"]["dense"].iloc[0], values["unigram_loss"].iloc[0]
    errors = (
        rows[rows.metric == "loss_increase_error"].drop_duplicates(["method", "retention"]).set_index(["method", "retention"])
    )
    for row in rows[rows.metric.isin(("perplexity", "loss", "loss_increase"))].itertuples():
        at = (row.method, row.retention)
        method = "INT8" if row.allocator == ALL_KEYS else "sparse"
        overlaps = {metric: values.get((metric, *at)) for metric in OVERLAPS}
        windows, error = (int(errors.n[at]), float(errors.value[at])) if at in errors.index else (1, math.nan)
        flag = quality_flag(
            loss=values["loss", *at], dense_loss=dense, floor_loss=floor, windows=windows, increase_error=error, method=method,
            **overlaps,
        )  # fmt: skip
        flags[row.Index] = "; ".join(filter(None, (flag, UNUSED if UNUSED in flags[row.Index] else "")))
    return flags


def answer_flags(rows: pd.DataFrame) -> pd.Series:
    """The flag of every row, where it is one of a task's score or of what a method changes of it, and dense attention may score
    below `LEAST_SCORE`: no difference is claimed. `rows` of a study of tasks; others keep what they have.
    """
    flags = rows.flag.fillna("").copy()
    if not {"task", "low"} <= {*rows.columns}:
        return flags
    scores = rows[rows.metric.isin(("accuracy", "rouge_l")) & (rows.method == "dense")]
    for dense in scores[pd.to_numeric(scores.low) < LEAST_SCORE].itertuples():
        of_task = (rows.task == dense.task) & rows.metric.str.startswith(dense.metric) & ~rows.metric.str.endswith("_p")
        for column in {"tokens", "chat"} & {*rows.columns}:
            of_task &= rows[column] == getattr(dense, column)
        mean = Interval(float(dense.value), float(dense.low), float(dense.high), int(dense.n))
        reason = unable(mean, chance=0, least=LEAST_SCORE)
        for index in rows.index[of_task]:
            if "no method is asked" not in flags[index]:
                kept = [flag for flag in flags[index].split("; ") if flag == UNUSED]
                flags[index] = "; ".join([*kept, f"{reason}: {NOT_CLAIMED}"])
    return flags


def difference_flags(change: float, low: float, high: float, p: float | None = None) -> list[str]:
    """The flags of what a method changes against dense attention, more being better, with its 95 % interval.

    `p`: of a test that is corrected for all comparisons of a study, which then decides. One question has no interval, NaN: it
    shows no difference.
    """
    shown = p <= LEVEL if p is not None else low > 0 or high < 0
    return [flag for flag, said in ((ABOVE_DENSE, change > 0), (SAME, not shown)) if said]


def density_flag(density: float, other: float) -> str:
    """By what share a method keeps more keys than another one; empty where both keep equally many."""
    excess = density / other - 1
    return f"density {excess:+.1%}" if abs(excess) > EQUAL_DENSITY else ""


def unable(mean: Interval, *, chance: float, least: float) -> str:
    """Why a task tells nothing of methods: what dense attention scores on it is too little; empty where it is enough.

    The lower end of its interval is to be at least `least`, and above what guessing scores.
    """
    if mean.low < least:
        return f"dense may score below {least:g}"
    if chance and mean.low <= chance:
        return f"dense cannot be told from chance ({chance:.2g})"
    return ""


def flag_lines(rows: pd.DataFrame, *, without: Collection[str] = ()) -> list[str]:
    """What the flags of rows say, a line each: the flag, and the methods, retentions and tasks that it is about.

    `without`: flags that the table above the lines shows by other means.
    """
    about: dict[str, dict[str, list[str]]] = {}
    for row in rows[rows.flag.fillna("") != ""].itertuples():
        place = f"{row.task} " if getattr(row, "task", "") else ""
        for flag in row.flag.split("; "):
            retentions = about.setdefault(flag, {}).setdefault(f"{place}{row.method}", [])
            if f"{row.retention:g}" not in retentions:
                retentions.append(f"{row.retention:g}")
    said = {flag: ", ".join(f"{who} at {' '.join(at)}" for who, at in places.items()) for flag, places in about.items()}
    return [f"{flag}: {places}" for flag, places in said.items() if flag not in without]
