"""What lm-evaluation-harness says of a method on its tasks: the pieces of a run's results, and rows made of them."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.cells import paired_error
from shadowattn.artifacts import sha256
from shadowattn.evaluation.intervals import Interval, mean_interval, paired_share_interval, share_interval
from shadowattn.reporting.flags import LEAST_SCORE, NOT_CLAIMED, difference_flags, unable
from shadowattn.reporting.rows import TaskRow

if TYPE_CHECKING:
    from shadowattn.evaluation.harness import ShadowAttnLM


@dataclass(frozen=True)
class HarnessRow(TaskRow):
    """A metric of a task as the harness names it, with its `filter`; `error` is the harness's standard error, or not a number.

    `NAME_change` is the mean over the same questions of what a method changes, against dense attention; its `error` is paired.
    `low` and `high` are the ends of a 95 % interval: Wilson's of a share of questions, of its change that of matched pairs, and
    Student's where a question's value is no 0 or 1. They are not a number, and there is no change, where a metric is no mean over
    questions.

    `version` is the task's own, `shots` its examples in the prompt. `source` is a local file by its name and SHA-256, or a data
    set of the hub with the SHA-256 of what was asked. `tokens` counts the longest prompt before any cut.
    """

    version: str = ""
    filter: str = ""
    shots: int = 0
    error: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")


def task_result(task: Any, name: str, results: dict[str, Any], model: "ShadowAttnLM") -> dict[str, Any]:
    """What the harness's `results` say of a task, as JSON: its version, shots, metrics, their values by question, and what was
    asked of the model.
    """
    samples, metrics = results["samples"].get(name, []), results["results"][name].items()
    asked = task.config.task  # its name in the requests
    return {
        "version": str(results["versions"][name]),
        "shots": int(results["n-shot"].get(name) or 0),
        "n": int(results["n-samples"][name]["effective"]),
        "source": _source(task.config, samples),
        "chance": _chance(task, samples),
        "tokens": max((tokens for (of, _), tokens in model.tokens.items() if of == asked), default=0),
        "side": "prompts, from the left" if model.allow_cut and task.OUTPUT_TYPE != "loglikelihood_rolling" else "none",
        "cut": sum(of == asked for of, _ in model.cut),
        "higher_is_better": dict(results["higher_is_better"].get(name, {})),
        "metrics": {metric: float(value) for metric, value in metrics if "," in metric and isinstance(value, int | float)},
        "questions": _by_question(samples),
    }


def task_rows(row: HarnessRow, results: dict[str, Any], dense: dict[str, Any]) -> list[HarnessRow]:
    """The rows of a method, of its results by task and dense attention's; `row` has the model's context as `context_tokens`."""
    rows = []
    for task, result in results.items():
        tokens, n, cut, context = result["tokens"], result["n"], result["cut"], row.context_tokens
        task_row = replace(
            row, task=task, version=result["version"], shots=result["shots"], n=n, source=result["source"], cut=result["side"],
            tokens=tokens, context_tokens=min(tokens, context),
        )  # fmt: skip
        run_flags = [row.flag] if row.flag else []
        run_flags += [f"{cut} of {n} prompts cut to the context of {context} tokens, from the left"] if cut else []
        for key, value in result["metrics"].items():
            metric, name = key.split(",", 1)
            if metric.endswith("_stderr"):
                continue
            answers, before = _answers(result, key), _answers(dense[task], key)
            better = result["higher_is_better"].get(metric, True)
            mean, flags = Interval(value, math.nan, math.nan, n), run_flags
            if len(answers) > 1:
                mean = mean_interval(answers)
            if better and before and _are_hits([*answers, *before]):
                mean = share_interval(int(sum(answers)), len(answers))
                chance = result["chance"] if metric.startswith("acc") else 0.0
                reason = unable(share_interval(int(sum(before)), len(before)), chance=chance, least=LEAST_SCORE)
                flags = [*flags, f"{reason}: {NOT_CLAIMED}"] if reason else flags
            error = result["metrics"].get(f"{metric}_stderr,{name}", math.nan)
            metric_row = replace(task_row, filter=name, low=mean.low, high=mean.high, flag="; ".join(flags))
            rows.append(replace(metric_row, metric=metric, value=value, error=error))
            if answers and before and row.method != "dense":
                change = _change(answers, before)
                sign = 1 if better else -1
                differences = difference_flags(sign * change.value, *sorted((sign * change.low, sign * change.high)))
                changed = replace(metric_row, metric=f"{metric}_change", value=change.value, error=paired_error(answers, before))
                rows.append(replace(changed, low=change.low, high=change.high, flag="; ".join([*flags, *differences])))
    return rows


def _answers(result: dict[str, Any], key: str) -> list[float]:
    """A metric's values by question, where the metric is their mean. None of others, such as a perplexity: the harness keeps
    log-likelihoods of it.
    """
    answers = result["questions"].get(key, [])
    is_mean = answers and math.isclose(float(np.mean(answers)), result["metrics"][key], rel_tol=1e-6, abs_tol=1e-9)
    return answers if is_mean else []


def _are_hits(values: Sequence[float]) -> bool:
    """Whether each question is answered or not, nothing between."""
    return set(values) <= {0.0, 1.0}


def _change(answers: Sequence[float], before: Sequence[float]) -> Interval:
    """What a method changes in the mean over the same questions; the ends are not a number for a single one."""
    changes = np.subtract(answers, before)
    if len(changes) < 2:
        return Interval(float(changes.mean()), math.nan, math.nan, len(changes))
    if _are_hits([*answers, *before]):
        return paired_share_interval([one == 1 for one in answers], [one == 1 for one in before])
    return mean_interval(changes.tolist())


def local_files(settings: Any) -> list[Path]:
    """Every local file that settings name, by paths, folders or patterns, whatever else they say."""
    if isinstance(settings, dict):
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        return [path for one in settings for path in local_files(one)]
    if not isinstance(settings, str) or not settings:
        return []
    found = [Path(path) for path in glob(str(Path(settings).expanduser()), recursive=True)]
    return sorted(path for one in found for path in ([one] if one.is_file() else one.rglob("*")) if path.is_file())


def _by_question(samples: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """The values of every metric that has one number a question, in the order of the questions."""
    values: dict[str, dict[int, float]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            if isinstance(sample[metric], bool | int | float | np.number):
                values.setdefault(f"{metric},{sample['filter']}", {})[sample["doc_id"]] = float(sample[metric])
    return {name: [one[question] for question in sorted(one)] for name, one in values.items()}


def _source(config: Any, samples: Sequence[dict[str, Any]]) -> str:
    """Where a task's questions are from: one local file by its content, anything else by that of the questions."""
    files = local_files([config.dataset_path, config.dataset_kwargs])
    if len(files) == 1:
        return f"{files[0].name} {sha256(files[0])[:12]}"
    hashes = {sample["doc_id"]: sample["doc_hash"] for sample in samples}
    asked = hashlib.sha256("".join(hashes[question] for question in sorted(hashes)).encode()).hexdigest()[:12]
    parts = (config.dataset_path, config.dataset_name, (config.dataset_kwargs or {}).get("revision"), f"questions {asked}")
    return " ".join(str(part) for part in parts if part)


def _chance(task: Any, samples: Sequence[dict[str, Any]]) -> float:
    """What guessing scores in the mean over the questions; 0 where a task gives no choices."""
    if task.OUTPUT_TYPE != "multiple_choice" or not samples:
        return 0.0
    right = [len(set(one["target"])) if isinstance(one["target"], list) else 1 for one in samples]
    choices = [len(task.doc_to_choice(one["doc"])) for one in samples]
    return float(np.divide(right, choices).mean())
