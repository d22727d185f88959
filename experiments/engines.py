"""The engine as a run's settings ask for it."""

from dataclasses import fields, replace
from typing import Any

from experiments.lab import Lab
from experiments.part_building import part_name
from shadowattn import checks
from shadowattn.engine.engine import Engine, cannot_look_ahead
from shadowattn.errors import InputError
from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.method import Method
from shadowattn.models.decoder import check_decoder
from shadowattn.models.load import DTYPES


def block_form(lab: Lab) -> BlockForm:
    """Raises `InputError` on settings that do not fit."""
    settings = lab.of("engine")
    return BlockForm(**{one.name: settings[one.name] for one in fields(BlockForm)})


def check_engine(lab: Lab) -> None:
    """Raises `InputError` where the settings ask for an engine that the lab's model does not give, before any calibration."""
    settings = lab.of("engine")
    checks.integer("engine.chunk_tokens", settings.chunk_tokens, least=1)
    checks.one_of("engine.attention_dtype", settings.attention_dtype, tuple(DTYPES))
    check_forms(lab, block_form(lab))
    check_look_ahead(lab)


def check_forms(lab: Lab, *forms: BlockForm) -> None:
    """Raises `InputError` where no engine runs the lab's model, or its channels do not fit one of the forms."""
    check_decoder(lab.loaded.model)
    config = lab.loaded.model.config.get_text_config()
    for form in forms:
        form.check_channels({config.hidden_size, config.intermediate_size, lab.shape.heads * lab.shape.head_dim})


def check_look_ahead(lab: Lab) -> None:
    """Raises `InputError` where the settings ask for lists made a layer early that there cannot be."""
    first = lab.of("engine").look_ahead
    if first is None:
        return
    most = lab.shape.layers - 1
    if not 1 <= first <= most:
        raise InputError(f"engine.look_ahead: expected a layer from 1 to {most}, or null, got {first}")
    retentions = lab.retentions if "retentions" in lab.needs else [lab.of("retention")]
    if min(retentions) >= 1:
        raise InputError("engine.look_ahead: expected a retention below 1, where there are lists, got 1; leave it out")
    check_ranks_early(lab, "engine.look_ahead")


def check_ranks_early(lab: Lab, setting: str) -> None:
    """Raises `InputError`, which names the `setting`, on a main method whose lists cannot be made a layer early."""
    ranks = (lab.main.within or lab.main).estimator_class
    if reason := cannot_look_ahead(ranks.sees, part_name(lab.main.estimator), lab.of("pipeline").mode):
        raise InputError(f"{setting}: {reason}")


def refuse_look_ahead(lab: Lab, instead: str) -> None:
    """Raises `InputError` where `engine.look_ahead` is set for a study that would not heed it; `instead`: what to use there."""
    if lab.of("engine").look_ahead is not None:
        raise InputError(f"engine.look_ahead: expected null, since this study does not take it from there; {instead}")


def refuse_form(lab: Lab, instead: str) -> None:
    """Raises `InputError` where settings of `engine` name a form that a study would not heed; `instead`: what to use there."""
    default, asked = BlockForm(), block_form(lab)
    changed = [one.name for one in fields(BlockForm) if getattr(asked, one.name) != getattr(default, one.name)]
    if changed:
        raise InputError(f"engine.{changed[0]}: expected its default, since this study does not take it from there; {instead}")


def build_engine(lab: Lab, method: Method | None = None, form: BlockForm | None = None, **options: Any) -> Engine:
    """The lab's model in an engine; `method` None: dense attention; `form` None, and `options` of `Engine` that are not given:
    those of the settings. Attention takes the engine's chunks, and not those of `graphs`, unless its estimates are such graphs.
    """
    if method and not method.has_graphs:
        method = replace(method, chunk_tokens=None)
    form, settings = form or block_form(lab), lab.of("engine")
    sizes = {"chunk_tokens": settings.chunk_tokens, "attention_dtype": settings.attention_dtype}
    options = sizes | {"look_ahead": settings.look_ahead if method else None} | options  # dense attention makes no lists
    ranges = lab.offline.block_ranges if form.needs_ranges else None
    return Engine(lab.loaded.model, method=method, form=form, ranges=ranges, **options)
