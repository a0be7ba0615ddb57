"""Up to which size the host decides how long a layer takes in eager mode. Imports nothing."""

MOST_ELEMENTS, MOST_PRODUCTS = 2**25, 2**35
"""Of x, the weight and the result, and of a product: the GPU then works on a pass for as long as the host takes to make
its calls one by one, or less (8192 x 1024 x 4096: 241 us for 372 in all; H100, 2026-11-26)."""


def is_small(m: int, n: int, k: int) -> bool:
    """Whether a layer of m tokens and a weight [n, k] is worth a call of its own (joined.py)."""
    return 0 < m * n * k <= MOST_PRODUCTS and max(m * k, m * n, n * k) <= MOST_ELEMENTS
