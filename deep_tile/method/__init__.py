"""Why a kernel is the right one: the walls of the hardware, and `explain`. Not needed to multiply; no GPU, no torch."""
