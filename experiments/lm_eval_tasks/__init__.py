"""Tasks of lm-evaluation-harness that need no hub: a YAML each, and what makes their questions."""
