"""The online stage: estimate → select → attend, for every chunk of a prefill.

`stages` defines the three steps and `executor` runs them. `estimators` score keys on the NPU or CPU, `selection` enforces
causality and sets each list's budget, and `kernels` select and attend on the CPU.
"""
