"""What a head loses as it keeps fewer keys, and what else is measured of it that might predict this."""

import pandas as pd

SIGNALS = ("ablation", "sensitivity_error", "sensitivity_divergence", "effective_keys")


def need_and_signals(rows: pd.DataFrame, retention: float) -> tuple[pd.Series, dict[str, pd.Series]]:
    """By layer and head: the loss increase where the head alone keeps `retention` of its keys, and what might predict it.

    Signals by name, those that were measured: `ablation`, the loss increase without the head; the other sensitivities at this
    retention; `effective_keys` of dense attention.
    """
    place = ["layer", "head"]
    heads = rows[rows["head"] >= 0]
    at = heads[heads.retention == retention].groupby("metric")
    sensitivities = {str(name): part.set_index(place).value for name, part in at if str(name).startswith("sensitivity_")}
    need = sensitivities.pop("sensitivity_loss")
    signals = {"ablation": heads[heads.metric == "loss_increase"]} if (heads.metric == "loss_increase").any() else {}
    signals |= {"effective_keys": heads[heads.metric == "effective_keys"]}
    series = {name: part.set_index(place).value for name, part in signals.items() if len(part)} | sensitivities
    return need, {name: series[name].reindex(need.index) for name in SIGNALS if name in series}
