"""Entry points: `python -m experiments.run`, `python -m experiments.train_reference_model`."""
