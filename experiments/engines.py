"""The engine as a run's settings ask for it."""

from dataclasses import fields

from experiments.lab import Lab
from shadowattn.engine.engine import Engine
from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.method import Method


def block_form(lab: Lab) -> BlockForm:
    """Raises `InputError` on settings that do not fit."""
    settings = lab.of("engine")
    return BlockForm(**{one.name: settings[one.name] for one in fields(BlockForm)})


def build_engine(lab: Lab, method: Method | None = None, form: BlockForm | None = None) -> Engine:
    """The lab's model in an engine; `method` None: dense attention; `form` None: that of the settings."""
    form, settings = form or block_form(lab), lab.of("engine")
    return Engine(
        lab.loaded.model,
        method=method,
        form=form,
        ranges=lab.offline.block_ranges if form.needs_ranges else None,
        chunk_tokens=settings.chunk_tokens,
        attention_dtype=settings.attention_dtype,
    )
