"""Models: loading them, and putting an attention of our own inside them."""

from shadowattn.models.load import LoadedModel, load_bundled, load_hub, load_known, load_local, load_random
from shadowattn.models.registry import bypass_layer, replace_attention
from shadowattn.models.requests import decoding, prompt
from shadowattn.models.shape import ModelShape, attended_layers, fingerprint, model_shape

__all__ = [
    "LoadedModel",
    "ModelShape",
    "attended_layers",
    "bypass_layer",
    "decoding",
    "fingerprint",
    "load_bundled",
    "load_hub",
    "load_known",
    "load_local",
    "load_random",
    "model_shape",
    "prompt",
    "replace_attention",
]
