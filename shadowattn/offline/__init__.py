"""The offline stage: importance by ablation → retention per head; observed Q and K → INT8 scales."""

from shadowattn.offline.allocators import allocate
from shadowattn.offline.importance import measure_importance
from shadowattn.offline.profile import load_profile, save_profile
from shadowattn.offline.scales import ScaleObservations, observe_scales, scale_grid

__all__ = [
    "ScaleObservations",
    "allocate",
    "load_profile",
    "measure_importance",
    "observe_scales",
    "save_profile",
    "scale_grid",
]
