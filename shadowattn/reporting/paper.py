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
# Fig. 4a: latency saved over dense attention at these retentions, on a middle core.
FIG_4A = {0.4: 0.124, 0.3: 0.247, 0.2: 0.343}
# mllm's port on the same phone (Xiaomi 14), single runs: milliseconds to the first token, dense and sparse, and the retention of
# its sparse layers.
MLLM_TTFT = {
    ("Qwen2.5-1.5B", 1024): (5431.974, 2421.385, 0.139438),
    ("Qwen2.5-1.5B", 2048): (15934.188, 5830.462, 0.138950),
    ("Qwen2.5-1.5B", 4096): (102427.645, 18479.409, 0.138706),  # the dense run was throttled
    ("Qwen1.5-1.8B", 1024): (6367.342, 2927.293, 0.166194),
    ("Qwen1.5-1.8B", 2048): (18397.042, 6854.959, 0.165706),
    ("Qwen1.5-1.8B", 4096): (64306.241, 18375.520, 0.165462),
    ("Qwen1.5-0.5B", 1024): (3340.596, 1461.830, 0.166193),
    ("Qwen1.5-0.5B", 2048): (13812.382, 4335.775, 0.165706),
    ("Qwen1.5-0.5B", 4096): (45178.520, 13285.944, 0.165461),
}

# Table 4 of the paper: recall in percent, INT8 per tensor, 128 WikiText-2 samples, mean over all heads.
TABLE_4_RETENTIONS = (0.2, 0.3, 0.4, 0.5, 0.8)
TABLE_4 = {
    "PhoneLM-0.5B": (99.32, 99.39, 99.45, 99.51, 99.79),
    "PhoneLM-1.5B": (99.24, 99.27, 99.29, 99.34, 99.61),
    "Qwen2-0.5B": (99.03, 99.32, 99.51, 99.59, 99.86),
    "Qwen2-1.5B": (99.68, 99.80, 99.83, 99.84, 99.95),
}
