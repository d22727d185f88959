"""Models: loading them, and putting an attention of our own inside them."""

from shadowattn.models.load import LoadedModel, load_bundled, load_hub, load_local, load_random, load_smollm2
from shadowattn.models.patch import (
    ModelShape,
    attach,
    attended_layers,
    bypass_layer,
    fingerprint,
    model_shape,
    replace_attention,
)

__all__ = [
    "LoadedModel",
    "ModelShape",
    "attach",
    "attended_layers",
    "bypass_layer",
    "fingerprint",
    "load_bundled",
    "load_hub",
    "load_local",
    "load_random",
    "load_smollm2",
    "model_shape",
    "replace_attention",
]
