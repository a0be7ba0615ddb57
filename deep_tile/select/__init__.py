"""Which kernel multiplies a problem, and on which blocks: sizes in, a config and numbers of a launch out.

In the order of imports: hardware.py, then schedule.py and defaults.py, cost.py, choose.py. tuned.py keeps what `tune`
found on this machine, streaming.py has launches of kernels that are bound by memory. No GPU, no torch.
"""
