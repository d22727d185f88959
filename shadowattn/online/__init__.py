"""The online stage: estimate → select → attend, for every chunk of a prefill."""
