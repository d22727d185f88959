"""The pipeline on devices that are not here: an event simulation from costs, and costs from what is known of a device."""

from shadowattn.online.simulation.events import simulate

__all__ = ["simulate"]
