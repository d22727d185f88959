"""What the paper publishes in numbers, to stand beside ours. What it only draws is not here."""

# Table 8: joules of one kernel at 1024 tokens on a Redmi K60 Champion.
TABLE_8 = {
    "PhoneLM-0.5B": {"C/G-Full": 3.72, "C/G-Sparse": 2.81, "C/G-Block-Sparse": 1.10, "NPU-Full": 0.85, "ours": 0.66},
    "PhoneLM-1.5B": {"C/G-Full": 8.59, "C/G-Sparse": 5.16, "C/G-Block-Sparse": 1.51, "NPU-Full": 1.29, "ours": 1.12},
    "Qwen2-0.5B": {"C/G-Full": 3.38, "C/G-Sparse": 2.35, "C/G-Block-Sparse": 0.88, "NPU-Full": 0.85, "ours": 0.56},
    "Qwen2-1.5B": {"C/G-Full": 5.29, "C/G-Sparse": 3.28, "C/G-Block-Sparse": 0.85, "NPU-Full": 1.10, "ours": 0.71},
}
# Of Fig. 10 only these are in the text: times faster than C/G-Full, and at most so many times faster than the lossy methods.
FIG_10 = {"mean_speedup": 3.5, "largest_speedup": 6.9, "largest_speedup_over_lossy": 4.0}
