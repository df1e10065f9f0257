"""One start, one set of data and one list of cases for the runs of all frameworks that must follow the same path."""

import numpy as np

STEPS, ROWS = 20, 4

# Keras adds Adam's epsilon before the bias correction, torch after it: plain Adam of the two parts by 5e-5 here with
# 1e-8. With this one it plays no part.
EPSILON = 1e-10

# Every codec joins with its spec, and the largest difference it may show.
CODECS = {"exact": 1e-5, "fp16": 1e-3, "bf16": 1e-3}
CASES = [f"{optimizer}|{codec}|{window}" for optimizer in ("sgd", "adam") for codec in CODECS for window in (1, 3)]


def start():
    """Each layer's kernel (inputs, outputs) and bias."""
    rng = np.random.default_rng(7)
    return [
        (rng.normal(size=(6, 24)).astype("f") * 0.4, rng.normal(size=24).astype("f") * 0.1),
        (rng.normal(size=(24, 3)).astype("f") * 0.2, rng.normal(size=3).astype("f") * 0.1),
    ]


def data(ranks, window):
    rng = np.random.default_rng(8)
    rows = STEPS * window * ranks * ROWS
    return rng.normal(size=(rows, 6)).astype("f"), rng.normal(size=(rows, 3)).astype("f")
