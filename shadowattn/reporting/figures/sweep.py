"""All jobs of a sweep in one figure."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import MARKERS, attending_to_all, levels, new_figure


def draw(rows: pd.DataFrame, metric: str) -> Figure:
    """One metric of every job of a sweep, a line for each method: against the retention where jobs differ in it, else by job."""
    of = rows[rows.metric == metric]
    whole = attending_to_all(of)
    dense, sparse = of[of.method == "dense"], of[(of.method != "dense") & ~of.method.isin(whole.method)]
    by_retention = sparse.retention.nunique() > 1
    jobs = list(dict.fromkeys(rows.job))
    drawn, axes = new_figure(columns=2 if len(jobs) > 4 else 1)
    axis = np.atleast_1d(axes)[0]
    if len(jobs) > 4:  # room for the legend, and for long names
        np.atleast_1d(axes)[1].axis("off")
    lines_of = sparse if len(sparse) else of
    names = ["method"] if not by_retention else ["method", *(["job"] if _more_than_retention(lines_of) else [])]
    for marker, (name, line) in zip(MARKERS * 9, lines_of.groupby(names, sort=False), strict=False):
        x = line.retention if by_retention else [jobs.index(job) for job in line.job]
        order = np.argsort(np.asarray(x), kind="stable")
        label = " ".join(map(str, name))
        axis.plot(np.asarray(x)[order], line.value.to_numpy()[order], marker=marker, markersize=4, label=label)
    if len(dense) and dense.value.nunique() == 1 and len(sparse):
        axis.axhline(dense.value.iloc[0], color="0.5", linestyle="--", label="dense")
    levels(axis, whole.groupby("method", sort=False).filter(lambda one: one.value.nunique() == 1).drop_duplicates("method"))
    if by_retention:
        axis.set(xlabel="retention (kept fraction of visible keys)")
    else:
        axis.set_xticks(range(len(jobs)), jobs, rotation=20, ha="right", fontsize=7)
    axis.set(ylabel=f"{metric.replace('_', ' ')} ({of.unit.iloc[0]})" if of.unit.iloc[0] != "1" else metric.replace("_", " "))
    drawn.legend(*axis.get_legend_handles_labels(), fontsize=7, loc="outside right upper")
    ns = sorted(of.n.unique())
    axis.set_title(f"{', '.join(sorted(set(of.model)))}, n = {' to '.join(map(str, dict.fromkeys([ns[0], ns[-1]])))}", fontsize=8)
    return drawn


def _more_than_retention(rows: pd.DataFrame) -> bool:
    """Whether jobs differ in something besides the retention: a method then has several values at one."""
    return rows.duplicated(["method", "retention"]).any()
