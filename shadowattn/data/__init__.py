"""Text in, token windows out: where calibration and evaluation get what they read."""
