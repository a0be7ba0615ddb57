"""Why a kernel is the right one: hardware walls and `explain`. Not needed to multiply; no GPU, no torch."""
