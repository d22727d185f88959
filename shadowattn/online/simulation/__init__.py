"""The pipeline on devices that are not here: its course from costs, and costs from what is known of a device."""

from shadowattn.online.simulation.course import simulate

__all__ = ["simulate"]
