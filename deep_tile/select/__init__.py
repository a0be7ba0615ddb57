"""Kernel selection and scheduling: sizes in, a config and launch parameters out.

Import order: hardware.py, then schedule.py and defaults.py, cost.py, choose.py. tuned.py keeps `tune`'s results on this
machine; streaming.py has launches for memory-bound kernels. No GPU, no torch.
"""
