"""The engine as a run's settings ask for it."""

from dataclasses import fields
from typing import Any

from experiments.lab import Lab
from shadowattn.engine.engine import Engine
from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.method import Method


def block_form(lab: Lab) -> BlockForm:
    """Raises `InputError` on settings that do not fit."""
    settings = lab.of("engine")
    return BlockForm(**{one.name: settings[one.name] for one in fields(BlockForm)})


def build_engine(lab: Lab, method: Method | None = None, form: BlockForm | None = None, **options: Any) -> Engine:
    """The lab's model in an engine; `method` None: dense attention; `form` None, and `options` of `Engine` that are not given:
    those of the settings.
    """
    form, settings = form or block_form(lab), lab.of("engine")
    options = {
        "chunk_tokens": settings.chunk_tokens,
        "attention_dtype": settings.attention_dtype,
        "look_ahead": settings.look_ahead if method else None,  # dense attention makes no lists
    } | options
    ranges = lab.offline.block_ranges if form.needs_ranges else None
    return Engine(lab.loaded.model, method=method, form=form, ranges=ranges, **options)
