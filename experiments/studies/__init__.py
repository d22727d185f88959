"""Studies: what an experiment measures. One file each, named by the `_target_` of `study` in `conf/exp/`."""
