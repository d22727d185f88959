"""Estimators: how important a key looks to a query row. One file each; `base` says what one is."""

from shadowattn.online.estimators.base import Estimator, check_estimator_type, check_lists, check_scores, logit_scales

__all__ = ["Estimator", "check_estimator_type", "check_lists", "check_scores", "logit_scales"]
