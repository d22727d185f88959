"""What is refused before any work: for each group of the configuration that a study needs, what cannot be computed as asked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.banks import OUTPUTS
from experiments.offline import check_fixed_budget
from experiments.part_building import OBSERVE, build, part_name
from shadowattn.errors import InputError
from shadowattn.graphs.buckets import DISTANCES
from shadowattn.graphs.estimation import INPUTS, inputs_for
from shadowattn.graphs.planner import POLICIES, launch_sizes
from shadowattn.kernels import choose, native
from shadowattn.models import ModelShape
from shadowattn.models.linear import LINEARS
from shadowattn.models.load import DTYPES
from shadowattn.offline.ablations import BY_NAME as ABLATIONS
from shadowattn.offline.racing import Race
from shadowattn.offline.sensitivity import sensitivity_grid
from shadowattn.offline.work import shard
from shadowattn.online.attention import DECODES, check_dense_above
from shadowattn.online.estimators.base import check_rule
from shadowattn.online.estimators.int8_device import Int8Device
from shadowattn.online.pipeline import MODES
from shadowattn.types import KEY_OFFSETS

if TYPE_CHECKING:
    from experiments.lab import Lab, MethodSettings
    from experiments.studies.base import Study


def check(lab: "Lab") -> None:
    """Raises `InputError` on the first thing that does not fit: first what needs no model, then what does."""
    for key, check_group in _GROUPS.items():
        if key in lab.needs:
            check_group(lab)
    if "estimator" in lab.needs:
        for method in lab.methods.values():
            check_method(lab, method)
    if "model" in lab.needs:
        _check_subject(lab)


def check_place(lab: "Lab", study: type["Study"]) -> None:
    """Raises `InputError` where the model is to be on a GPU, and what is asked for runs on the CPU alone."""
    if lab.place.type == "cpu":
        return
    setting, remedy = f"model.device={lab.of('model').device}", "or model.device=cpu"
    if not study.on_gpu:
        raise InputError(f"{setting}: {lab.of('experiment')} times or builds what runs on the CPU alone; use model.device=cpu")
    if "kernel" in lab.needs and lab.of("kernel") == "native":
        raise InputError(f"kernel=native: reads the CPU's memory, got {setting}; use kernel=auto, {remedy}")
    if "pipeline" in lab.needs and lab.of("pipeline").mode != "batched":
        raise InputError(
            f"pipeline={lab.of('pipeline').mode}: stages run apart on the CPU, got {setting}; use pipeline=batched, {remedy}"
        )
    if "importance" in lab.needs and lab.of("importance").linear == "onednn":
        raise InputError(f"importance.linear=onednn: multiplies on the CPU, got {setting}; use importance.linear=auto, {remedy}")
    if "device" in lab.needs and lab.of("device").lower() not in ("auto", "cpu"):
        raise InputError(f"device={lab.of('device')}: its graphs read the CPU's memory, got {setting}; use device=auto, {remedy}")
    for name, method in lab.methods.items() if "estimator" in lab.needs else ():
        if method.on_device:
            raise InputError(
                f"{name}: selection=device selects in OpenVINO's graphs, got {setting}; use selection=per_row, {remedy}"
            )
        for one in filter(None, (method, method.within)):
            if not one.estimator_class.reads_cpu_memory:
                continue
            if method.int8:
                raise InputError(
                    f"{name}: {method.int8}, and graphs read the CPU's memory, got {setting}; leave it out, {remedy}"
                )
            raise InputError(
                f"{name}: estimator={part_name(one.estimator)} runs OpenVINO's graphs on the CPU's memory, got {setting}; "
                f"use int8_fused, which ranks the same keys, {remedy}"
            )


def check_divergence(lab: "Lab", study: "Study") -> None:
    """Raises `InputError` where the divergence is asked for on windows on which the study measures none."""
    asked = lab.of("evaluation").divergence_windows if "evaluation" in lab.needs else None
    if not asked:
        return
    if (windows := study.diverging(lab)) is None:
        raise InputError(
            f"evaluation.divergence_windows: {lab.of('experiment')} measures no divergence from dense attention, got {asked}; "
            "leave it out"
        )
    setting, count = windows
    if asked > count:
        raise InputError(f"evaluation.divergence_windows: expected at most {setting}={count}, got {asked}; set {setting} too")


def check_choice(key: str, value: Any, options: tuple) -> None:
    """Raises `InputError` where a setting is none of those known."""
    if value not in options:
        listed = ", ".join(str(one or "null") for one in options)
        raise InputError(f"{key}: expected one of {listed}, got {value!r}")


def check_count(key: str, value: int | None, *, least: int = 1) -> None:
    """Raises `InputError` where a number is below what makes sense; None stands for a default."""
    if value is not None and value < least:
        raise InputError(f"{key}: expected at least {least}, got {value}")


def _check_importance(lab: "Lab") -> None:
    importance = lab.of("importance")
    choices = {
        "ablation": tuple(ABLATIONS),
        "method": ("shared", "plain", "racing"),
        "lines": ("document", "artifact"),
        "weighting": ("windows", "batches"),
        "dtype": (None, *DTYPES),
        "linear": LINEARS,
    }
    for name, options in choices.items():
        check_choice(f"importance.{name}", importance[name], options)
    for name, least in (("windows", 0), ("window_tokens", 2), ("batch", 1)):
        check_count(f"importance.{name}", importance[name], least=least)
    Race(**importance.race)
    if importance.method == "racing" and "allocator" in lab.needs and "importance" not in build(lab.of("allocator")).needs:
        raise InputError(
            "importance.method: racing stops when the retentions of an allocator by importance are settled, got "
            f"allocator={part_name(lab.of('allocator'))}; use allocator=waterfill, or importance.method=shared"
        )
    scales = importance.activation_scales
    if scales not in (None, OBSERVE) and not Path(scales).expanduser().is_file():
        raise InputError(f"importance.activation_scales: expected a file, got {scales!r}; set importance.activation_scales=FILE")
    if importance.method == "racing" and importance.weighting == "batches":
        raise InputError("importance.weighting: expected windows with method=racing, which stops in the middle of batches")
    shard([], lab.of("shard").index, lab.of("shard").count)


def _check_sensitivity(lab: "Lab") -> None:
    sensitivity_grid(lab.of("sensitivity").retentions)


def _check_graphs(lab: "Lab") -> None:
    graphs = lab.of("graphs")
    choices = {"inputs": ("auto", *INPUTS), "output": OUTPUTS, "lookup": DISTANCES, "shapes": POLICIES}
    for name, options in choices.items():
        check_choice(f"graphs.{name}", graphs[name], options)
    for name in ("chunk_tokens", "calibration_windows", "nncf_samples", "limit", "top_k_buckets", "compile_threads"):
        check_count(f"graphs.{name}", graphs[name])
    launch_sizes(graphs.launch_heads, heads=1, kv_heads=1)
    inputs = inputs_for(graphs.inputs, lab.device_name)
    if lab.device_name != "CPU" and inputs not in ("static", "int8"):
        raise InputError(
            f"graphs.inputs: {inputs} gives scores in integer steps, beyond the 16-bit floats that {lab.device_name} computes "
            "in; use graphs.inputs=int8 or static, or device=cpu"
        )
    if graphs.ahead is not None and lab.device_name.split(".")[0] != "NPU":
        raise InputError(
            f"graphs.ahead: expected an NPU for what was compiled ahead, and graphs run on {lab.device_name} here; leave it out, "
            "or use device=npu on a machine that has one"
        )
    if inputs == "int8" and graphs.output != "float" and "key_offset" in lab.needs and lab.of("key_offset") == "none":
        raise InputError(
            f"graphs.output: {graphs.output} with graphs.inputs=int8 needs a key offset, without which 256 steps do not tell the "
            "keys of a model with biases apart; use key_offset=mean, or graphs.output=float"
        )


def _check_evaluation(lab: "Lab") -> None:
    evaluation = lab.of("evaluation")
    check_count("evaluation.windows", evaluation.windows)
    check_count("evaluation.fidelity_windows", evaluation.fidelity_windows, least=0)
    check_count("evaluation.divergence_windows", evaluation.divergence_windows, least=0)
    check_count("evaluation.generated_tokens", evaluation.generated_tokens, least=0)
    check_count("evaluation.context_tokens", evaluation.context_tokens, least=2)
    if evaluation.generated_tokens and not evaluation.fidelity_windows:
        raise InputError(
            f"evaluation.generated_tokens: {evaluation.generated_tokens} of each of no windows; set evaluation.fidelity_windows"
        )


def _check_decode(lab: "Lab") -> None:
    check_choice("decode", lab.of("decode"), DECODES)
    if lab.of("decode") == "shared" and any(method.on_device for method in lab.methods.values()):
        raise InputError("decode=shared: ranks keys by scores, and graphs that select return none; use decode=dense")


def _check_mode(lab: "Lab") -> None:
    check_choice("pipeline.mode", lab.of("pipeline").mode, MODES)
    lab.pipeline  # noqa: B018 - refuses what else does not fit


def _check_name(lab: "Lab") -> None:
    if "dense" in lab.methods:
        raise InputError("method: 'dense' is the baseline's name and always runs; call the method something else")


def _check_compare(lab: "Lab") -> None:
    if lab.main.name in lab.of("compare"):
        raise InputError(f"method: {lab.main.name!r} is one of those to compare with; call the method something else")


def _check_full(lab: "Lab") -> None:
    taken = {"dense", *(lab.methods if "estimator" in lab.needs else ())} & set(lab.full)
    if taken:
        raise InputError(f"full: {', '.join(map(repr, sorted(taken)))} is another method's name; call it something else")
    for name, form in lab.full.items():
        check_choice(f"full.{name}.key_offset", form.key_offset, KEY_OFFSETS)


_GROUPS: dict[str, Callable[["Lab"], None]] = {
    "device": lambda lab: lab.device,
    "importance": _check_importance,
    "sensitivity": _check_sensitivity,
    "evaluation": _check_evaluation,
    "graphs": _check_graphs,
    "dense_above": lambda lab: check_dense_above(lab.of("dense_above")),
    "calibration": lambda lab: build(lab.of("calibration")),
    "key_offset": lambda lab: check_choice("key_offset", lab.of("key_offset"), KEY_OFFSETS),
    "grid": lambda lab: build(lab.of("grid")),
    "pipeline": _check_mode,
    "decode": _check_decode,
    "method": _check_name,
    "compare": _check_compare,
    "full": _check_full,
}


def check_method(lab: "Lab", method: "MethodSettings") -> None:
    """Raises `InputError` where a method's parts do not fit one another, or the graphs."""
    if method.allocator is not None:
        build(method.allocator)
    if "grid" in method.needs and lab.place.type == "cpu" and native.library() is None:  # whatever the attention kernel
        within = method.within is not None and "grid" in method.within.needs
        name = part_name((method.within if within else method).estimator)
        remedy = f"another estimator within {part_name(method.estimator)}" if within else "estimator=int8_graph"
        raise InputError(
            f"{method.name}: estimator={name}: its estimate runs on the native kernels, which were not built, since the "
            "installation found no C++ compiler; install one (GCC 12 or Clang 19 and later) and install shadowattn again, or use "
            f"{remedy}"
        )
    check_rule(method.rule, method.estimator_class)
    _check_settings(method)
    if method.rule.query_block != 1 and method.estimator_class.sets_budgets:
        raise InputError(
            f"{method.name}: {part_name(method.estimator)} gives single rows budgets of their own, got "
            f"query_block={method.rule.query_block}; use selection=per_row"
        )
    _check_place(method)
    block, chunk_tokens = method.selection.query_block, lab.of("graphs").chunk_tokens
    if chunk_tokens % block:
        raise InputError(
            f"{method.name}: expected graphs.chunk_tokens to be a multiple of query_block={block}, so that no block straddles "
            f"two chunks, got {chunk_tokens}"
        )
    if "pipeline" in lab.needs:
        _check_pipeline(lab, method)


def _check_settings(method: "MethodSettings") -> None:
    """Builds an estimator that nothing has to be made for, or the one within it, so that settings that do not fit are refused
    before any work."""
    if method.needs <= {"key_offset"}:
        with _named(method):
            build(method.estimator)
    elif method.within:
        _check_settings(method.within)


def _check_shape(method: "MethodSettings", shape: ModelShape) -> None:
    """Raises `InputError` where settings of an estimator, or of one within it, do not fit the model's shape."""
    settings = {str(key): value for key, value in method.estimator.items() if not str(key).startswith("_")}
    if method.within:
        _check_shape(method.within, shape)
        settings["estimator"] = method.within.estimator_class
    with _named(method):
        method.estimator_class.check_settings(shape.head_dim, shape.kv_heads, **settings)


def _check_native_estimate(lab: "Lab", method: "MethodSettings") -> None:
    """Raises `InputError` where the native kernels do not quantise tensors such as the model's."""
    shape, dtype = lab.shape, lab.loaded.model.dtype
    if "grid" not in method.needs or lab.place.type != "cpu":
        return
    if choose("auto", head_dim=shape.head_dim, dtype=dtype).name != "native":
        raise InputError(
            f"{method.name}: estimator: the native estimate takes float32 or bfloat16 and a head dimension that is a multiple of "
            f"8 up to 256, got {dtype} and {shape.head_dim}; use estimator=int8_graph"
        )


@contextmanager
def _named(method: "MethodSettings") -> Iterator[None]:
    """Puts the method's name before what is refused."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{method.name}: estimator: {error}") from error


def _check_place(method: "MethodSettings") -> None:
    name, selection = method.name, method.selection
    check_choice(f"{name}: selection.place", selection.place, ("host", "device"))
    if not method.on_device:
        if selection.key_block != 1:
            raise InputError(f"{name}: selection.key_block={selection.key_block} needs selection.place=device")
        return
    if "bank" not in method.needs:
        raise InputError(
            f"{name}: selection.place=device: expected estimator=int8_graph, whose graphs select, got "
            f"{part_name(method.estimator)}"
        )
    Int8Device.check(method.rule)
    check_count(f"{name}: selection.key_block", selection.key_block)


def _check_pipeline(lab: "Lab", method: "MethodSettings") -> None:
    mode = lab.pipeline.mode
    if mode in ("grouped", "planned") and (method.on_device or method.estimator_class.selects):
        raise InputError(
            f"pipeline={mode}: {method.name} selects while it estimates, so that there are no scores to launch for; use "
            "pipeline=batched, serial or overlap, or estimator=int8_graph"
        )
    if mode == "planned":
        lab.pipeline.profile.check({"estimator": method.estimator_class.__name__})


def _check_subject(lab: "Lab") -> None:
    """Model, text and lengths against each other."""
    shape, lengths = lab.shape, {}
    for method in lab.methods.values() if "estimator" in lab.needs else ():
        _check_shape(method, shape)
        _check_native_estimate(lab, method)
    if "evaluation" in lab.needs:
        lengths["evaluation.context_tokens"] = lab.context_tokens
    if "importance" in lab.needs:
        lengths["importance.window_tokens"] = lab.of("importance").window_tokens
    if "sensitivity" in lab.needs and lab.of("sensitivity").window_tokens:
        lengths["sensitivity.window_tokens"] = lab.of("sensitivity").window_tokens
    for key, tokens in lengths.items():
        if tokens > shape.context_tokens:
            raise InputError(f"{key}: the model's context is {shape.context_tokens} tokens, got {tokens}; set it to no more")
    if "evaluation" in lab.needs and lab.of("evaluation").generated_tokens >= lab.context_tokens:
        raise InputError(
            f"evaluation.generated_tokens: expected fewer than the {lab.context_tokens} tokens of a window, got "
            f"{lab.of('evaluation').generated_tokens}; a prompt is to be left"
        )
    if "allocator" in lab.needs:
        methods = lab.methods.values() if "estimator" in lab.needs else ()
        for allocator in [method.allocator for method in methods] or [lab.of("allocator")]:
            for retention in lab.retentions:
                check_fixed_budget(allocator, retention, shape)
    if "kernel" in lab.needs:
        lab.kernel  # noqa: B018 - refuses kernels that do not fit
    if "data" in lab.needs and lengths:
        _ = lab.questions
        if "evaluation" in lab.needs:
            lab.heldout()
        key = max(lengths, key=lengths.get)
        lab.calibration(tokens=lengths[key], windows=1, key=key)
