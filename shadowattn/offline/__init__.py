"""The offline stage: importance by ablation → retention per head; observed Q and K → INT8 scales.

Heads are ranked by the loss without them (`importance`) or by what fewer keys cost them (`sensitivity`). One of the `allocators`
turns either into a retention for every head.
"""

from shadowattn.offline.allocators import allocate
from shadowattn.offline.block_ranges import observe_block_ranges
from shadowattn.offline.channels import observe_channels
from shadowattn.offline.first_looks import observe_first_look
from shadowattn.offline.importance import measure_ablations, measure_importance, summarise
from shadowattn.offline.indexers import train_indexer
from shadowattn.offline.key_offsets import observe_key_offset
from shadowattn.offline.profile import load_profile, save_profile
from shadowattn.offline.racing import Race, race_ablations, replay_race
from shadowattn.offline.scale_report import ScaleFit, report_scales
from shadowattn.offline.scales import ScaleObservations, layer_grids, observe_scales, scale_grid
from shadowattn.offline.sensitivity import measure_sensitivity
from shadowattn.offline.stability import Stability, rank_correlation, stability

__all__ = [
    "Race",
    "ScaleFit",
    "ScaleObservations",
    "Stability",
    "allocate",
    "layer_grids",
    "load_profile",
    "measure_ablations",
    "measure_importance",
    "measure_sensitivity",
    "observe_block_ranges",
    "observe_channels",
    "observe_first_look",
    "observe_key_offset",
    "observe_scales",
    "race_ablations",
    "rank_correlation",
    "replay_race",
    "report_scales",
    "save_profile",
    "scale_grid",
    "stability",
    "summarise",
    "train_indexer",
]
